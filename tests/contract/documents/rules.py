"""Rules over several fields: the ladder, the batch, compile, gates; and many problems at once."""

from tests.contract.documents.case import CHECKPOINT, FOUR, GATE, OPTIMIZER, REMOVE, bad, good

LADDER = (
    bad(
        "stages out of order",
        {"spec.ladder": [{**FOUR[1]}, {"name": "last", "strategy": "single"}]},
        "spec.ladder: strategies must be in the order",
    ),
    bad(
        "one strategy twice",
        {"spec.ladder.0": {"name": "a", "strategy": "ddp", "steps": 5}},
        "spec.ladder: strategies must be in the order",
    ),
    good(
        "a ladder with gaps", {"spec.ladder": [FOUR[0], {"name": "last", "strategy": "zero3", "processesPerNode": 2}]}
    ),
    bad(
        "a canary without steps",
        {"spec.ladder.0.steps": REMOVE},
        "spec.ladder: every stage but the last must have steps, its canary window; add steps ",
    ),
    bad(
        "a last stage with steps",
        {"spec.ladder.1.steps": 10},
        "spec.ladder: the last stage must not have steps, it runs to spec.training.steps; rem",
    ),
    bad(
        "a last stage with replay",
        {"spec.ladder.1.replaySteps": 1},
        "spec.ladder: the last stage must not have replaySteps",
    ),
    bad(
        "single on two processes",
        {"spec.ladder.0.processesPerNode": 2},
        "spec.ladder[0]: strategy single must be one process",
    ),
    bad("single on two nodes", {"spec.ladder.0.nodes": 2}, "spec.ladder[0]: strategy single must be one process"),
    good("single on one GPU", {"spec.ladder.0.gpusPerNode": 1}),
    bad(
        "GPUs and processes",
        {"spec.ladder.1.gpusPerNode": 2},
        "spec.ladder[1].processesPerNode is 2; must not be set beside gpusPerNode",
    ),
    bad(
        "replay of the whole window",
        {"spec.ladder.0.replaySteps": 20},
        "spec.ladder[0].replaySteps is 20; must be less than the 20 steps of its stage; use at most 19",
    ),
    good("replay of all but one step", {"spec.ladder.0.replaySteps": 19}),
    good("no replay", {"spec.ladder.0.replaySteps": 0}),
    bad(
        "canaries as long as the training",
        {"spec.training.steps": 20},
        "spec.training.steps is 20; must be more than the 20 steps of all canary stages toget",
    ),
    good("one step after the canaries", {"spec.training.steps": 21}),
    good(
        "ddp, fsdp and zero3 on one process",
        {"spec.ladder": [{**stage, "nodes": 1, "processesPerNode": 1} for stage in FOUR]},
    ),
)

BATCH = (
    bad(
        "a batch that no stage divides",
        {"spec.training.globalBatchSize": 17},
        "spec.training.globalBatchSize is 17; must be a multiple of microBatchSize x processe",
    ),
    bad(
        "a batch that one stage does not divide",
        {"spec.training.globalBatchSize": 20},
        "spec.training.globalBatchSize is 20; must be a multiple of microBatchSize x processe",
    ),
    bad(
        "a batch smaller than one round",
        {"spec.training.globalBatchSize": 4},
        "spec.training.globalBatchSize is 4; must be a multiple of microBatchSize x processes",
    ),
    bad(
        "worlds that do not divide each other",
        {
            "spec.ladder": [
                FOUR[0],
                {**FOUR[1], "processesPerNode": 3},
                {"name": "last", "strategy": "fsdp", "processesPerNode": 2},
            ]
        },
        "spec.training.globalBatchSize is 16; must be a multiple of microBatchSize x processe",
    ),
    bad(
        "worlds without a small common multiple",
        {
            "spec.ladder": [
                {**FOUR[1], "processesPerNode": 61},
                {"name": "last", "strategy": "fsdp", "processesPerNode": 59},
            ]
        },
        "spec.training.globalBatchSize is 16; must be a multiple of microBatchSize x processe",
    ),
    good(
        "a batch for 4 x 8 GPUs",
        {
            "spec.training.globalBatchSize": 512,
            "spec.ladder": [
                {**FOUR[0], "gpusPerNode": 1},
                {"name": "full", "strategy": "fsdp", "nodes": 4, "gpusPerNode": 8},
            ],
        },
    ),
)

OFFLOAD = (
    bad(
        "ddp with offload",
        {"spec.ladder.1.offload": "Parameters"},
        'spec.ladder[1].offload is "Parameters"; must be None for strategies single and ddp',
    ),
    bad(
        "single with offload",
        {"spec.ladder.0.offload": "ParametersAndOptimizer"},
        'spec.ladder[0].offload is "ParametersAndOptimizer"; must be None for strategies single and ddp',
    ),
    bad(
        "fsdp with parameters alone",
        {"spec.ladder.1.strategy": "fsdp", "spec.ladder.1.offload": "Parameters"},
        'spec.ladder[1].offload is "Parameters"; must not be Parameters for fsdp',
    ),
    good("fsdp with all", {"spec.ladder.1.strategy": "fsdp", "spec.ladder.1.offload": "ParametersAndOptimizer"}),
    good("zero3 with parameters", {"spec.ladder.1.strategy": "zero3", "spec.ladder.1.offload": "Parameters"}),
    good("ddp with none", {"spec.ladder.1.offload": "None"}),
)

EVALUATION = (
    good("an evaluation", {"spec.training.evaluation": {"everySteps": 10}}),
    bad(
        "an evaluation of nothing",
        {"spec.training.evaluation": {"everySteps": 10, "share": "0"}},
        'spec.training.evaluation.share is "0"; must be more than 0 and at most 0.5',
    ),
    bad(
        "an evaluation of most samples",
        {"spec.training.evaluation": {"everySteps": 10, "share": "0.6"}},
        'spec.training.evaluation.share is "0.6"; must be more than 0 and at most 0.5',
    ),
    bad("an evaluation at no time", {"spec.training.evaluation": {}}, "spec.training.evaluation.everySteps is missing"),
    bad(
        "a gate on an evaluation that is not made",
        {"spec.gates": [{**GATE, "source": {"report": "evaluationLoss"}}]},
        'spec.gates: gate "p95" looks at evaluationLoss, and nothing is evaluated; set spec.training.evaluation',
    ),
    good(
        "a gate on the evaluation",
        {
            "spec.training.evaluation": {"everySteps": 10},
            "spec.gates": [{**GATE, "source": {"report": "evaluationLoss"}}],
        },
    ),
    good("trackers", {"spec.training.trackers": ["tensorboard", "wandb", "mlflow"]}),
    bad(
        "a tracker that nobody knows",
        {"spec.training.trackers": ["tensorbord"]},
        'spec.training.trackers[0] is "tensorbord"; must be one of tensorboard, wandb, mlflow; did you',
    ),
)

TRAINING = (
    bad(
        "a warm-up longer than the training",
        {OPTIMIZER: {"warmupSteps": 101}},
        f"{OPTIMIZER}.warmupSteps is 101; must be at most spec.training.steps; use 100 or less",
    ),
    good("a warm-up as long as the training", {OPTIMIZER: {"warmupSteps": 100}}),
    good("checkpoints rarer than the training is long", {CHECKPOINT: {"everySteps": 1000}}),
)

COMPILE = (
    good("a mode", {"spec.compile": {"mode": "max-autotune-no-cudagraphs"}}),
    good("a profile of another device", {"spec.compile": {"profile": "published/rtx4090"}}),
    good("no profile", {"spec.compile": {"profile": "none", "options": {"max_autotune": True}}}),
    bad(
        "a profile of neither set",
        {"spec.compile": {"profile": "h100"}},
        'spec.compile.profile is "h100"; must be default, published or none, or with a device as in default/h100',
    ),
    bad(
        "a device of no profile",
        {"spec.compile": {"profile": "none/h100"}},
        'spec.compile.profile is "none/h100"; must be default',
    ),
    bad(
        "mode and options",
        {"spec.compile": {"mode": "default", "options": {}}},
        "spec.compile.options: must not be set beside mode",
    ),
    bad(
        "options of another backend",
        {"spec.compile": {"backend": "aot_eager", "options": {"a": 1}}},
        "spec.compile.options: must not be set for another backend",
    ),
    good(
        "another backend",
        {"spec.compile": {"backend": "aot_eager", "keep": "IfCorrect", "scope": "full", "dynamic": "Static"}},
    ),
    good("inductor in capitals, with options", {"spec.compile": {"backend": "INDUCTOR", "options": {"a": 1}}}),
    good("no backend at all", {"spec.compile": {"backend": "no"}}),
    good(
        "lengths that change, and shapes to warm up on",
        {
            "spec.compile": {
                "dynamicDims": {"tokens": [1], "targets": [1]},
                "shapes": [{"tokens": [4, 128], "targets": [4, 128]}, {"tokens": [4, 256]}],
                "fullgraph": True,
                "fallback": "Fail",
            }
        },
    ),
    bad(
        "a dimension that no tensor has",
        {"spec.compile": {"dynamicDims": {"tokens": [-1]}}},
        "spec.compile.dynamicDims.tokens[0] is -1; must be at least 0",
    ),
    bad(
        "a shape of nothing",
        {"spec.compile": {"shapes": [{"tokens": [4, 0]}]}},
        "spec.compile.shapes[0].tokens[1] is 0; must be at least 1",
    ),
    bad(
        "lengths that change, compiled one by one",
        {"spec.compile": {"dynamic": "Static", "dynamicDims": {"tokens": [1]}}},
        "spec.compile.dynamicDims: must not be set beside dynamic Static",
    ),
    bad(
        "a fallback of another kind",
        {"spec.compile": {"fallback": "Abort"}},
        'spec.compile.fallback is "Abort"; must be one of Eager, Fail',
    ),
    bad(
        "a dynamic in lower case",
        {"spec.compile": {"dynamic": "auto"}},
        'spec.compile.dynamic is "auto"; must be one of Auto, Static, Dynamic; did you mean Auto?',
    ),
    bad(
        "a limit of no recompilation",
        {"spec.compile": {"recompileLimit": 0}},
        "spec.compile.recompileLimit is 0; must be at least 1",
    ),
    bad(
        "a negative tolerance",
        {"spec.compile": {"tolerances": {"probeLoss": "-1e-6"}}},
        'spec.compile.tolerances.probeLoss is "-1e-6"; must be a decimal number in quotes, not negative',
    ),
)

GATES = (
    good("a gate", {"spec.gates": [{**GATE, "stages": ["ddp"], "mode": "DryRun", "onFailure": "Hold"}]}),
    bad(
        "a gate without limits",
        {"spec.gates": [{**GATE, "thresholdRange": {}}]},
        "spec.gates[0].thresholdRange: must have min, max or both",
    ),
    bad(
        "a gate with min above max",
        {"spec.gates": [{**GATE, "thresholdRange": {"min": "1e1", "max": "2"}}]},
        'spec.gates[0].thresholdRange.min is "1e1"; must not be more than max',
    ),
    good("a gate with one allowed value", {"spec.gates": [{**GATE, "thresholdRange": {"min": "-1", "max": "-1.0"}}]}),
    bad(
        "a gate for a stage that is not there",
        {"spec.gates": [GATE, {**GATE, "name": "b", "stages": ["ddp", "fsdp"]}]},
        'spec.gates: gate "b" is for stage "fsdp", which must be a stage of the ladder',
    ),
    bad(
        "a gate on an unknown measurement",
        {"spec.gates": [{**GATE, "source": {"report": "stepTimeP95"}}]},
        'spec.gates[0].source.report is "stepTimeP95"; must be one of',
    ),
    bad(
        "a gate without a source",
        {"spec.gates": [{"name": "a", "thresholdRange": {"max": "1"}}]},
        "spec.gates[0].source is missing",
    ),
    bad("two gates of one name", {"spec.gates": [GATE, GATE]}, 'spec.gates is a list with name "p95" 2 times'),
    good("a default gate replaced", {"spec.gates": [{**GATE, "name": "memory"}]}),
)

SEVERAL = (
    bad(
        "many problems at once",
        {
            "metadata.name": "Big",
            "spec.trainings": {},
            "spec.training.steps": "many",
            "spec.training.globalBatchSize": 17,
            "spec.training.precision": "fp8",
            "spec.ladder.1.steps": 5,
            "spec.compile": {"mode": "default", "options": {}},
        },
        "spec.trainings is not a known field",
        'spec.training.precision is "fp8"',
        'spec.training.steps is "many"',
        'metadata.name is "Big"',
        "spec.ladder: the last stage must not have steps",
        "spec.training.globalBatchSize is 17",
        "spec.compile.options: must not be set beside mode",
    ),
)

CASES = (
    *LADDER,
    *BATCH,
    *OFFLOAD,
    *EVALUATION,
    *TRAINING,
    *COMPILE,
    *GATES,
    *SEVERAL,
)
