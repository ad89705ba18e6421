"""fp16 under every strategy: scaled, skipped where gradients overflow, never taken for a divergence, and resumed."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.trainer.conftest import Ranks
from tests.trainer.messages import CAUSAL_LM, attempt, odd
from tests.trainer.small import EVERY_STRATEGY, checkpoints, description, trained
from tests.trainer.stages import run

from ctj_api.attempt import LineageEntry
from ctj_api.report import Report
from ctj_api.spec import Strategy
from ctj_trainer.loss_scale import LossScaleState
from ctj_trainer.strategies.foundation import PrecisionUnavailableError

TOO_LARGE = 2.0**40  # overflows fp16 activations' gradients for some halvings to come
FP16 = {"precision": "fp16"}


def ten_steps(strategy: Strategy, *, scale: float, **changes: Any) -> dict[str, Any]:
    with trained(strategy, **changes) as one:
        found = one.prepared.loss_scale
        if found is not None:
            found.state = LossScaleState(scale=scale, good_steps=0)
        scales = []
        for step in range(1, 11):
            one.run(range(step, step + 1))
            scales.append(found.state.scale if found is not None else None)
        # inf or nan depends on the order of a sum over ranks
        norms = [norm if math.isfinite(norm) else math.inf for norm in one.norms]
        return {"losses": one.losses, "norms": norms, "scales": scales}


def every_strategy(**keywords: Any) -> dict[str, dict[str, Any]]:
    return {strategy.value: ten_steps(strategy, **keywords) for strategy in EVERY_STRATEGY}


def test_fp16_agrees_over_strategies_and_stays_near_fp32(ranks: Ranks) -> None:
    fp32 = ranks(ten_steps, strategy=Strategy.SINGLE, scale=1.0)[0]
    first, second = ranks(every_strategy, scale=2.0**16, **FP16)
    assert first == second
    single = first["single"]
    assert single["losses"] != fp32["losses"]
    assert single["losses"] == pytest.approx(fp32["losses"], rel=3e-3)
    assert single["norms"] == pytest.approx(fp32["norms"], rel=2e-2)
    assert single["losses"][-1] < single["losses"][0] - 0.3
    for strategy, found in first.items():
        assert found["losses"] == pytest.approx(single["losses"], rel=3e-3), strategy
        assert found["norms"] == pytest.approx(single["norms"], rel=2e-2), strategy
        assert found["scales"] == [2.0**16] * 10


def test_every_strategy_and_rank_skips_the_same_overflowing_steps(ranks: Ranks) -> None:
    first, second = ranks(every_strategy, scale=TOO_LARGE, **FP16)
    assert first == second
    single = first["single"]
    skipped = [not math.isfinite(norm) for norm in single["norms"]]
    assert skipped[0]
    assert single["scales"][0] == TOO_LARGE / 2
    for found in first.values():
        assert found["scales"] == single["scales"]
        assert [not math.isfinite(norm) for norm in found["norms"]] == skipped


def save_each(root: Path) -> dict[str, list[float]]:
    went_on = {}
    for strategy in EVERY_STRATEGY:
        with trained(strategy, **FP16) as one:
            one.run(range(1, 3))
            one.prepared.loss_scale.state = LossScaleState(scale=2.0**11, good_steps=7)
            if strategy is not Strategy.SINGLE or dist.get_rank() == 0:
                checkpoints(root / strategy.value, strategy=strategy).save(one.prepared, description(2, strategy))
            went_on[strategy.value] = one.run(range(3, 6))
    dist.barrier()
    return went_on


def resume_each(root: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for strategy in EVERY_STRATEGY:
        with trained(strategy, seed=5, **FP16) as one:
            for origin in EVERY_STRATEGY:
                dist.barrier()
                lineage = [LineageEntry(attempt=1, max_step=2)]
                checkpoints(root / origin.value, strategy=strategy, lineage=lineage).load(one.prepared)
                scale = one.prepared.loss_scale.state
                found[f"{origin.value} -> {strategy.value}"] = {
                    "scale": (scale.scale, scale.good_steps),
                    "origin": origin.value,
                    "losses": one.run(range(3, 6)),
                    "after": one.prepared.loss_scale.state.good_steps,
                }
    return found


def test_the_scale_travels_between_all_strategies_with_the_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    went_on = ranks(save_each, root=tmp_path)[0]
    for found in ranks(resume_each, root=tmp_path):
        assert len(found) == 16
        for pair, resumed in found.items():
            assert resumed["scale"] == (2.0**11, 7), pair
            assert resumed["after"] == 10, pair
            assert resumed["losses"] == pytest.approx(went_on[resumed["origin"]], rel=3e-3), pair


def run_with_scale(document: dict[str, Any], root: str, scale: float) -> dict[str, Any]:
    from ctj_trainer import loss_scale

    before, loss_scale.INITIAL = loss_scale.INITIAL, scale
    try:
        return run(document, root)
    finally:
        loss_scale.INITIAL = before


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_stage_counts_skipped_steps_and_goes_on(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    document = attempt(strategy, recipe=CAUSAL_LM, training=FP16)
    records = ranks(run_with_scale, document=document, root=str(tmp_path), scale=2.0**22)[0]["records"]
    skipped = [step for step, record in sorted(records.items()) if record["skipped"]]
    assert skipped[0] == 1
    assert skipped[-1] < 12
    assert [step for step, record in records.items() if not math.isfinite(float(record["gradNorm"]))] == skipped
    assert records[1]["lossScale"] == 2.0**21
    report = Report.model_validate_json((tmp_path / "run" / "report.json").read_text())
    assert report.exit_code == 0
    assert report.mode == "Compiled", report.compile
    assert report.measurements["nonFiniteSteps"] == 0
    assert report.measurements["skippedSteps"] == len(skipped)
    assert report.measurements["probeGradNormRelative"] < 5e-3


def diverges(root: str) -> str:
    from ctj_trainer.loop import NonFiniteError

    with pytest.raises(NonFiniteError) as caught:
        run(attempt(recipe=odd("infinite_gradient"), training=FP16, end=40, compile={"scope": "disabled"}), root)
    return str(caught.value)


def test_a_gradient_that_no_scale_cures_is_a_divergence_at_the_floor(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks(diverges, root=str(tmp_path)):
        assert message.startswith("step 17: ")  # 2**16 halved sixteen times


def without_kernel(root: str) -> str:
    with pytest.raises(PrecisionUnavailableError) as caught:
        run(attempt(recipe=odd("distances"), training=FP16, compile={"scope": "disabled"}), root)
    return str(caught.value)


def test_a_model_without_fp16_kernels_is_refused_with_the_way_out(ranks: Ranks, tmp_path: Path) -> None:
    """torch.pdist has none for CPUs."""
    for message in ranks(without_kernel, root=str(tmp_path)):
        assert "spec.training.precision is fp16" in message
        assert "use bf16 or fp32" in message
