"""Attempt messages of a small job, as the deciding side would send them. No torch."""

from typing import Any

LADDER = [
    {"name": strategy, "strategy": strategy, "processesPerNode": 2, "steps": 12}
    for strategy in ("ddp", "fsdp", "zero3")
]
CAUSAL_LM = {
    "name": "causal_lm",
    "config": {
        "model": {"hiddenSize": 32, "layers": 2, "heads": 4},
        "data": {"builtin": "python-stdlib", "sequenceLength": 32},
    },
}


def odd(oddity: str = "none") -> dict[str, Any]:
    return {"name": "tests.trainer.odd_recipes:build", "config": {"oddity": oddity}}


def attempt(
    strategy: str = "ddp",
    *,
    number: int = 1,
    start: int = 0,
    end: int = 12,
    recipe: dict[str, Any] | None = None,
    compile: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """An attempt document; replay of 3 steps is saved for."""
    document = {
        "version": 1,
        "job": {"namespace": "default", "name": "job", "uid": "u"},
        "attempt": number,
        "stage": next(stage for stage in LADDER if stage["strategy"] == strategy),
        "ladder": LADDER,
        "window": {"startStep": start, "endStep": end, "saveAt": [end - 3, end]},
        "floorStep": start,
        "mode": "Compiled",
        "microBatchSize": 2,
        "recipe": recipe or odd(),
        "training": {
            "steps": 40,
            "globalBatchSize": 8,
            "microBatchSize": 2,
            "optimizer": {"learningRate": "3e-3", "warmupSteps": 3},
            "checkpoint": {"everySteps": 100},
        }
        | (training or {}),
        "compile": {"backend": "aot_eager", "keep": "IfCorrect"} | (compile or {}),
    }
    return document | changes
