"""Changes of a stored job."""

from tests.contract.documents.case import PASSED, REMOVE, update

UPDATES = (
    update("nothing changed", {}),
    update("a longer training", {"spec.training.steps": 200}),
    update("another config", {"spec.recipe.config": {"a": 1}}),
    update("another image, suspended", {"spec.image": "trainer:2", "spec.suspend": True, "spec.retryToken": "again"}),
    update("other processes for a stage", {"spec.ladder.1.processesPerNode": 4}),
    update(
        "another batch",
        {"spec.training.globalBatchSize": 32},
        "spec.training.globalBatchSize is 32; must stay 16 once the job exists",
    ),
    update("another seed", {"spec.training.seed": 1}, "spec.training.seed is 1; must stay 0 once the job exists"),
    update("the default written out", {"spec.training.seed": 0, "spec.training.precision": "fp32"}),
    update(
        "another recipe",
        {"spec.recipe.name": "other"},
        'spec.recipe.name is "other"; must stay causal_lm once the job exists',
    ),
    update(
        "an evaluation that holds out what was trained on",
        {"spec.training.evaluation": {"everySteps": 10}},
        "spec.training.evaluation",
    ),
    update(
        "another store",
        {"spec.training.checkpoint": {"url": "s3://bucket/b"}},
        "spec.training.checkpoint.url",
    ),
    update("a tracker", {"spec.training.trackers": ["tensorboard"]}),
    update(
        "a stage renamed",
        {"spec.ladder.0.name": "first"},
        "spec.ladder: stages, their order and strategies must not change",
    ),
    update(
        "a stage of another strategy",
        {"spec.ladder.1.strategy": "fsdp"},
        "spec.ladder: stages, their order and strategies must not change",
    ),
    update(
        "a stage removed", {"spec.ladder.0": REMOVE}, "spec.ladder: stages, their order and strategies must not change"
    ),
    update(
        "a stage added",
        {"spec.ladder.1.steps": 5, "spec.ladder.2": {"name": "last", "strategy": "fsdp"}},
        "spec.ladder: stages, their order and strategies must not change",
    ),
    update(
        "another precision before a stage has passed",
        {"spec.training.precision": "bf16"},
        status={"ladder": [{"name": "single", "phase": "Running"}]},
    ),
    update(
        "another precision after a stage has passed",
        {"spec.training.precision": "bf16"},
        'spec.training.precision is "bf16"; must stay fp32 once a stage has passed',
        status=PASSED,
    ),
)

CASES = (*UPDATES,)
