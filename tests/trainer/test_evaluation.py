"""An evaluation measures every strategy alike and leaves no trace in the training."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.conftest import Ranks
from tests.trainer.messages import attempt, odd
from tests.trainer.stages import run

from ctj_api.report import Report


def document(strategy: str, *, every: int | None, end: int = 6, **changes: Any) -> dict[str, Any]:
    """Of 64 samples 7 are held out: the last round of two ranks' micro batches of 2 is not full."""
    evaluation = {"everySteps": every, "share": "0.11", "steps": 3}
    return attempt(strategy, end=end, training={} if every is None else {"evaluation": evaluation}, **changes)


def losses(result: dict[str, Any], key: str = "loss") -> dict[int, float]:
    return {step: record[key] for step, record in sorted(result["records"].items()) if record.get(key) is not None}


CASES = [("ddp", {}), ("fsdp", {}), ("zero3", {}), ("fsdp", {"mode": "Eager", "recipe": odd("dropout")})]


@pytest.mark.parametrize(("strategy", "changes"), CASES, ids=["ddp", "fsdp", "zero3", "fsdp with dropout"])
def test_evaluating_changes_no_training_loss_and_compiles_nothing(
    ranks: Ranks, tmp_path: Path, strategy: str, changes: dict[str, Any]
) -> None:
    often = ranks(run, document=document(strategy, every=2, **changes), root=str(tmp_path / "often"))[0]
    once = ranks(run, document=document(strategy, every=1000, **changes), root=str(tmp_path / "once"))[0]
    assert losses(often) == losses(once)
    assert list(losses(often, "evaluationLoss")) == [2, 4, 6]
    assert list(losses(once, "evaluationLoss")) == [6]  # the end of the stage
    assert losses(often, "evaluationLoss")[6] == losses(once, "evaluationLoss")[6]
    report = Report.model_validate_json((tmp_path / "often" / "run" / "report.json").read_text())
    assert report.measurements["evaluationLoss"] == losses(often, "evaluationLoss")[6]
    assert report.measurements["recompilesAfterWarmup"] == 0
    assert often["records"][6]["graphs"] == once["records"][6]["graphs"] == (0 if "mode" in changes else 1)


def test_every_strategy_measures_the_same(ranks: Ranks, tmp_path: Path) -> None:
    found = [
        losses(
            ranks(run, document=document(strategy, every=3, mode="Eager"), root=str(tmp_path / strategy))[0],
            "evaluationLoss",
        )
        for strategy in ("ddp", "fsdp", "zero3")
    ]
    assert found[0].keys() == {3, 6}
    assert found[0][3] != found[0][6]
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-6)


def test_samples_that_the_recipe_brings_leave_the_training_samples_alone(ranks: Ranks, tmp_path: Path) -> None:
    own = odd()
    own["config"]["brings_evaluation"] = True
    without = ranks(run, document=document("ddp", every=None, mode="Eager"), root=str(tmp_path / "a"))[0]
    with_own = ranks(run, document=document("ddp", every=2, mode="Eager", recipe=own), root=str(tmp_path / "b"))[0]
    assert losses(with_own) == losses(without)
    assert len(losses(with_own, "evaluationLoss")) == 3


def test_a_stop_does_not_wait_for_an_evaluation(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    control = {"attempt": 1, "sequence": 1, "stop": "Checkpoint", "reason": "suspended"}
    (tmp_path / "run" / "control.json").write_text(json.dumps(control))
    result = ranks(run, document=document("ddp", every=1, mode="Eager"), root=str(tmp_path))[0]
    assert result["stopped"] == "suspended"
    assert list(result["records"]) == [1]
    assert losses(result, "evaluationLoss") == {}
