"""Single values: types, limits, forms."""

from tests.contract.documents.case import CHECKPOINT, FOUR, GATE, OPTIMIZER, REMOVE, bad, good

TYPES = (
    bad("steps in quotes", {"spec.training.steps": "100"}, 'spec.training.steps is "100"; must be a whole number'),
    bad(
        "steps with a fraction", {"spec.training.steps": 100.5}, "spec.training.steps is 100.5; must be a whole number"
    ),
    bad("steps that are true", {"spec.training.steps": True}, "spec.training.steps is true; must be a whole number"),
    bad("no steps", {"spec.training.steps": REMOVE}, "spec.training.steps is missing"),
    bad("steps of null", {"spec.training.steps": None}, "spec.training.steps is missing"),
    bad("a list for a map", {"spec.training": []}, "spec.training is []; must be a map"),
    bad("a map for a list", {"spec.ladder": {"single": {}}}, 'spec.ladder is {"single": {}}; must be a list'),
    bad("text for a stage", {"spec.ladder.1": "ddp"}, 'spec.ladder[1] is "ddp"; must be a map'),
    bad("null for a stage", {"spec.ladder.1": None}, "spec.ladder[1] is null; must be a map"),
    bad(
        "a number for a rate",
        {f"{OPTIMIZER}.learningRate": 0.001},
        f'{OPTIMIZER}.learningRate is 0.001; must be text; quote it: "0.001"',
    ),
    bad("text for suspend", {"spec.suspend": "yes"}, 'spec.suspend is "yes"; must be true or false'),
    bad("text for the config", {"spec.recipe.config": "tiny"}, 'spec.recipe.config is "tiny"; must be a map'),
    bad(
        "a number in a node selector",
        {"spec.template": {"nodeSelector": {"gpu": 1}}},
        "spec.template.nodeSelector.gpu is 1; must be text",
    ),
    bad(
        "text in a list of containers",
        {"spec.template": {"sidecars": ["a"]}},
        'spec.template.sidecars[0] is "a"; must be a map',
    ),
    good(
        "null where a default exists",
        {"spec.compile": None, "spec.training.seed": None, "spec.suspend": None, OPTIMIZER: None},
    ),
    good("null where nothing is needed", {"spec.image": None, "spec.gates": None, "spec.ladder.1.steps": None}),
    good("null inside the template", {"spec.template": {"nodeSelector": {"a": None}, "affinity": None}}),
)

LIMITS = (
    bad(
        "no steps at all",
        {"spec.training.steps": 0},
        "spec.training.steps is 0; must be at least 1",
    ),
    good("the most steps", {"spec.training.steps": 100_000_000}),
    bad(
        "one step more than the most",
        {"spec.training.steps": 100_000_001},
        "spec.training.steps is 100000001; must be at most",
    ),
    bad(
        "a number beyond 64 bits",
        {"spec.training.steps": 2**70},
        "spec.training.steps is 1.1805916207174113e+21; must be at most",
    ),
    bad("a negative seed", {"spec.training.seed": -1}, "spec.training.seed is -1; must be at least 0"),
    good("the largest seed", {"spec.training.seed": 2**31 - 1}),
    bad("a seed of 32 bits", {"spec.training.seed": 2**31}, "spec.training.seed is 2147483648; must be at most"),
    bad("an empty ladder", {"spec.ladder": []}, "spec.ladder is a list of 0; must have at least 1 item"),
    bad(
        "a ladder of five",
        {"spec.ladder": [*FOUR, {"name": "five", "strategy": "zero3"}]},
        "spec.ladder is a list of 5; must have at most 4 items",
    ),
    bad("no checkpoint kept", {CHECKPOINT: {"keep": 0}}, f"{CHECKPOINT}.keep is 0; must be at least 1"),
    bad(
        "an empty claim",
        {CHECKPOINT: {"volume": {"claimName": ""}}},
        f'{CHECKPOINT}.volume.claimName is ""; must have at least',
    ),
    bad("a volume without a claim", {CHECKPOINT: {"volume": {}}}, f"{CHECKPOINT}.volume.claimName is missing"),
    good("a store", {CHECKPOINT: {"url": "s3://bucket/checkpoints"}}),
    bad(
        "a store that is a folder",
        {CHECKPOINT: {"url": "/mnt/checkpoints"}},
        f'{CHECKPOINT}.url is "/mnt/checkpoints"; must be a URL of a store',
    ),
    good("a volume", {CHECKPOINT: {"volume": {"claimName": "ckpt"}, "everySteps": 1}}),
    bad(
        "an unknown strategy",
        {"spec.ladder.1.strategy": "fsdp2"},
        'spec.ladder[1].strategy is "fsdp2"; must be one of single, ddp, fsdp, zero3; did you',
    ),
    good("fp16", {"spec.training.precision": "fp16"}),
    bad(
        "a precision that no strategy has",
        {"spec.training.precision": "fp8"},
        'spec.training.precision is "fp8"; must be one of fp32, bf16, fp16',
    ),
    bad(
        "a strategy in capitals",
        {"spec.ladder.1.strategy": "DDP"},
        'spec.ladder[1].strategy is "DDP"; must be one of single, ddp, fsdp, zero3; did you mean ddp?',
    ),
    good("a recipe of one's own", {"spec.recipe.name": "my_package.recipe:build"}),
    bad(
        "a recipe that is a file",
        {"spec.recipe.name": "recipes/mine.py"},
        'spec.recipe.name is "recipes/mine.py"; must be a built-in recipe or module:function',
    ),
    bad(
        "33 gates",
        {"spec.gates": [{**GATE, "name": f"g-{number}"} for number in range(33)]},
        "spec.gates is a list of 33; must have at most 32 items",
    ),
    bad(
        "65 labels",
        {"spec.template": {"labels": {f"l-{number}": "v" for number in range(65)}}},
        "spec.template.labels is a map of 65; must have at most 64 entries",
    ),
    bad(
        "a hold without a unit",
        {"spec.remedies": {"hold": {"timeout": "24"}}},
        'spec.remedies.hold.timeout is "24"; must be numbers with units',
    ),
    good("a hold of hours and minutes", {"spec.remedies": {"hold": {"timeout": "1h30m", "onTimeout": "Rollback"}}}),
    bad("a token of 254 letters", {"spec.retryToken": "t" * 254}, "spec.retryToken is "),
)

DECIMALS = (
    good(
        "rates in all forms",
        {OPTIMIZER: {"learningRate": "1e-3", "weightDecay": "0", "minimumRate": "1", "gradientClip": "1.50E+0"}},
    ),
    bad(
        "a rate in words",
        {f"{OPTIMIZER}.learningRate": "fast"},
        f'{OPTIMIZER}.learningRate is "fast"; must be a decimal number in quotes',
    ),
    bad(
        "a negative rate",
        {f"{OPTIMIZER}.learningRate": "-1e-3"},
        f'{OPTIMIZER}.learningRate is "-1e-3"; must be a decimal number in quotes, not negative',
    ),
    bad(
        "a rate of zero",
        {f"{OPTIMIZER}.learningRate": "0.0"},
        f'{OPTIMIZER}.learningRate is "0.0"; must be more than 0',
    ),
    bad(
        "a rate with an exponent of three digits",
        {f"{OPTIMIZER}.learningRate": "1e-300"},
        f"{OPTIMIZER}.learningRate is ",
    ),
    bad(
        "a share above one", {f"{OPTIMIZER}.minimumRate": "1.1"}, f'{OPTIMIZER}.minimumRate is "1.1"; must be at most 1'
    ),
    bad(
        "a speedup of zero",
        {"spec.compile": {"minSpeedup": "0"}},
        'spec.compile.minSpeedup is "0"; must be more than 0',
    ),
    bad("a rate with a line break", {f"{OPTIMIZER}.learningRate": "1e-3\n"}, f"{OPTIMIZER}.learningRate is "),
)

CASES = (
    *TYPES,
    *LIMITS,
    *DECIMALS,
)
