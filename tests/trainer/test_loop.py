"""What a stage does between its first and its last step: equal numbers, eager when it must, stop and resume."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.conftest import Ranks
from tests.trainer.messages import CAUSAL_LM, attempt, odd
from tests.trainer.stages import run

from ctj_api.report import Report


def report_of(root: Path, name: str = "run") -> Report:
    return Report.model_validate_json((root / name / "report.json").read_text())


def losses(result: dict[str, Any]) -> list[float]:
    return [record["loss"] for _, record in sorted(result["records"].items())]


@pytest.fixture(scope="module")
def eager_losses(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    root = tmp_path_factory.mktemp("eager")
    result = ranks(run, document=attempt(mode="Eager"), root=str(root))[0]
    assert {record["mode"] for record in result["records"].values()} == {"Eager"}
    return losses(result)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
def test_compiled_steps_give_eager_losses_with_one_graph_and_no_recompile(
    ranks: Ranks, tmp_path: Path, eager_losses: list[float], strategy: str
) -> None:
    result = ranks(run, document=attempt(strategy), root=str(tmp_path))[0]
    assert losses(result) == pytest.approx(eager_losses, rel=1e-6)
    assert result["records"][12]["graphs"] == 1
    report = report_of(tmp_path)
    assert report.mode == "Compiled"
    assert report.measurements["recompilesAfterWarmup"] == 0
    assert report.measurements["graphBreaks"] == 0
    assert report.measurements["probeLossRelative"] <= 1e-6
    assert report.compile is not None
    assert report.compile.speedup is not None


@pytest.mark.parametrize(
    ("strategy", "training"),
    [
        ("ddp", {"precision": "bf16"}),
        ("ddp", {"activationCheckpointing": "Blocks"}),
        ("fsdp", {"activationCheckpointing": "Blocks", "precision": "bf16"}),
        ("zero3", {"activationCheckpointing": "Blocks"}),
    ],
)
def test_recomputed_and_bf16_blocks_compile_to_one_graph_as_well(
    ranks: Ranks, tmp_path: Path, strategy: str, training: dict[str, Any]
) -> None:
    document = attempt(strategy, end=6, recipe=CAUSAL_LM, training=training)
    result = ranks(run, document=document, root=str(tmp_path))[0]
    report = report_of(tmp_path)
    assert report.mode == "Compiled", report.compile
    assert report.measurements["recompilesAfterWarmup"] == 0
    assert report.measurements["graphBreaks"] == 0
    assert result["records"][6]["graphs"] == 1


@pytest.mark.parametrize("backend", ["fails_forward", "fails_backward", "fails_on_rank_1"])
def test_a_failing_compiler_costs_speed_and_nothing_else(
    ranks: Ranks, tmp_path: Path, eager_losses: list[float], backend: str
) -> None:
    result = ranks(run, document=attempt(compile={"backend": backend}), root=str(tmp_path))[0]
    assert losses(result) == eager_losses  # to the last bit
    report = report_of(tmp_path)
    assert report.mode == "Eager"
    assert report.compile is not None
    assert report.compile.reason.startswith("backend_failed: BackendCompilerFailed")
    assert "no compiler in this image" in report.compile.reason
    assert [notice for notice in report.notices if "eager from step 1 on" in notice]


def test_a_wrong_compiler_is_found_before_the_first_step(
    ranks: Ranks, tmp_path: Path, eager_losses: list[float]
) -> None:
    result = ranks(run, document=attempt(compile={"backend": "wrong_forward"}), root=str(tmp_path))[0]
    assert losses(result) == eager_losses
    report = report_of(tmp_path)
    assert report.mode == "Eager"
    assert report.compile is not None
    assert report.compile.reason.startswith("Not equal to eager: loss differs by")
    assert report.measurements["probeLossRelative"] > 1e-6


def test_compiled_code_that_raises_leaves_an_eager_verdict_for_the_next_attempt(
    ranks: Ranks, tmp_path: Path, eager_losses: list[float]
) -> None:
    ranks(expect_compiled_code_error, root=str(tmp_path))
    again = attempt(number=2, compile={"backend": "fails_at_run_time"}, lineage=[{"attempt": 1, "maxStep": 12}])
    result = ranks(run, document=again, root=str(tmp_path))[0]
    assert losses(result) == eager_losses
    report = report_of(tmp_path)
    assert report.mode == "Eager"
    assert report.compile is not None
    assert report.compile.reason.startswith("compiled code raised RuntimeError: accessing tensor output")


def expect_compiled_code_error(root: str) -> None:
    from ctj_trainer.failures import CompiledCodeError

    with pytest.raises(CompiledCodeError, match=r"the next attempt runs this stage eager"):
        run(attempt(compile={"backend": "fails_at_run_time"}), root)


def test_a_recompile_storm_ends_in_eager_steps_and_names_the_attribute(ranks: Ranks, tmp_path: Path) -> None:
    quiet = {"scope": "disabled"}
    recipe = odd("counts_calls")
    reference = ranks(run, document=attempt(recipe=recipe, compile=quiet), root=str(tmp_path / "eager"))[0]
    result = ranks(run, document=attempt(recipe=recipe), root=str(tmp_path))[0]
    assert losses(result) == pytest.approx(losses(reference), rel=1e-5)
    modes = [record["mode"] for _, record in sorted(result["records"].items())]
    assert modes[-1] == "Eager"
    report = report_of(tmp_path)
    assert report.mode == "Eager"
    assert report.compile is not None
    assert report.compile.reason.startswith(("recompile_limit", "recompile_storm"))
    assert "calls" in report.compile.reason


def test_ragged_batches_give_the_mean_over_all_tokens(ranks: Ranks, tmp_path: Path) -> None:
    counted = ranks(run, document=attempt(recipe=odd("ragged_counted")), root=str(tmp_path / "counted"))[0]
    found_out = ranks(run, document=attempt(recipe=odd("ragged")), root=str(tmp_path / "found"))[0]
    whole = attempt(recipe=odd("ragged"), microBatchSize=4)
    assert losses(found_out) == pytest.approx(losses(counted), rel=1e-6)
    assert losses(ranks(run, document=whole, root=str(tmp_path / "whole"))[0]) == pytest.approx(
        losses(counted), rel=1e-6
    )
    assert {record["tokens"] for record in found_out["records"].values()} != {8 * 6}
    assert [n for n in report_of(tmp_path / "found").notices if "count_tokens" in n]
    assert not report_of(tmp_path / "counted").notices


def test_control_stops_all_ranks_after_the_same_step_with_a_checkpoint(
    ranks: Ranks, tmp_path: Path, eager_losses: list[float]
) -> None:
    (tmp_path / "run").mkdir()
    control = {"attempt": 1, "sequence": 3, "stop": "Checkpoint", "reason": "suspended"}
    (tmp_path / "run" / "control.json").write_text(json.dumps(control))
    results = ranks(run, document=attempt(mode="Eager"), root=str(tmp_path))
    assert [result["stopped"] for result in results] == ["suspended", "suspended"]
    report = report_of(tmp_path)
    assert report.exit_code == 143
    assert report.checkpoint is not None
    assert report.checkpoint.step == 1
    # The next attempt goes on from there to the same numbers.
    resumed = attempt(mode="Eager", number=2, lineage=[{"attempt": 1, "maxStep": 12}])
    result = ranks(run, document=resumed, root=str(tmp_path), name="again")[0]
    assert min(result["records"]) == 2
    assert losses(result) == eager_losses[1:]


def test_control_eager_flips_between_steps_and_is_acknowledged(
    ranks: Ranks, tmp_path: Path, eager_losses: list[float]
) -> None:
    (tmp_path / "run").mkdir()
    control = {"attempt": 1, "sequence": 2, "compile": "Eager", "reason": "memory pressure"}
    (tmp_path / "run" / "control.json").write_text(json.dumps(control))
    result = ranks(run, document=attempt(), root=str(tmp_path))[0]
    assert losses(result) == pytest.approx(eager_losses, rel=1e-6)
    assert [record["mode"] for _, record in sorted(result["records"].items())] == ["Compiled"] + 11 * ["Eager"]
    report = report_of(tmp_path)
    assert report.compile is not None
    assert report.compile.reason == "memory pressure"
    assert json.loads((tmp_path / "run" / "progress.json").read_text())["controlSequence"] == 2
    published = json.loads((tmp_path / "run" / "metrics-0.json").read_text())["values"]
    tokens_per_sample = result["records"][12]["tokens"] / 8
    assert published["ctj_train_tokens_total"][""] == tokens_per_sample * published["ctj_train_samples_total"][""]


def test_a_loss_that_is_no_number_ends_the_stage_without_an_update_or_a_checkpoint(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(expect_non_finite, root=str(tmp_path))
    report = report_of(tmp_path)
    assert report.exit_code == 14
    assert report.checkpoint is None
    assert report.measurements["nonFiniteSteps"] == 1
    assert math.isnan(report.measurements["finalLoss"])


def expect_non_finite(root: str) -> None:
    from ctj_trainer.loop import NonFiniteError

    with pytest.raises(NonFiniteError, match=r"step 1: loss nan"):
        run(attempt(recipe=odd("not_a_number")), root)


def test_a_restart_reuses_the_verdict_and_repeats_the_numbers(ranks: Ranks, tmp_path: Path) -> None:
    """Also where compiled turned out slow: steps before the verdict run compiled again."""
    slow = {"keep": "IfFaster", "minSpeedup": "1000"}
    document = attempt(recipe=CAUSAL_LM, compile=slow, training={"checkpoint": {"everySteps": 2, "keep": 9}})
    first = ranks(run, document=document, root=str(tmp_path))[0]
    report = report_of(tmp_path)
    assert report.mode == "Eager"
    modes = [record["mode"] for _, record in sorted(first["records"].items())]
    timed = ["Compiled", "Eager", "Compiled", "Eager"]
    assert modes == ["Compiled", "Compiled", *timed, *(6 * ["Eager"])]
    again = document | {"attempt": 2, "lineage": [{"attempt": 1, "maxStep": 2}]}
    second = ranks(run, document=again, root=str(tmp_path), name="again")[0]
    assert [r["mode"] for _, r in sorted(second["records"].items())] == modes[2:]
    assert losses(second) == losses(first)[2:]
    verdict = report_of(tmp_path, "again").compile
    assert verdict == report.compile
