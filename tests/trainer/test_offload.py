"""Offload takes effect where it is asked for, and changes no number.

On a CPU there is no other place to move to: that bytes leave an accelerator is not measured here.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.conftest import Ranks
from tests.trainer.small import CPU, checkpoints, description, trained

from ctj_api.attempt import LineageEntry
from ctj_api.spec import Offload, Strategy

EVERYTHING = Offload.PARAMETERS_AND_OPTIMIZER


def four_steps(strategy: Strategy, offload: Offload) -> dict[str, Any]:
    with trained(strategy, offload=offload) as run:
        run.run(range(1, 5))
        weights = run.prepared.full_weights()
        total = sum(w.double().sum().item() for w in weights.values())
        policy = policy_of(strategy, run.prepared)
        return {"losses": run.losses, "norms": run.norms, "weights": total, "policy": policy}


def policy_of(strategy: Strategy, prepared: Any) -> Any:
    if strategy is Strategy.ZERO3:
        zero = prepared.model.config["zero_optimization"]
        return {key: zero[key]["device"] for key in ("offload_param", "offload_optimizer") if key in zero} | {
            "optimizer": prepared.model.optimizer.offload_optimizer,
            "parameters": prepared.model.optimizer.offload_param,
        }
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in (prepared.inner, *prepared.inner.model.layers)]
    return [type(group.offload_policy).__name__ for group in groups]


def test_fsdp_offloads_shards_of_every_unit_and_trains_the_same(ranks: Ranks) -> None:
    plain = ranks(four_steps, strategy=Strategy.FSDP, offload=Offload.NONE)
    moved = ranks(four_steps, strategy=Strategy.FSDP, offload=EVERYTHING)
    assert plain[0]["policy"] == ["OffloadPolicy"] * 3
    assert moved[0]["policy"] == ["CPUOffloadPolicy"] * 3
    for before, after in zip(plain, moved, strict=True):
        assert {**after, "policy": None} == {**before, "policy": None}


@pytest.mark.parametrize("offload", [Offload.PARAMETERS, EVERYTHING])
def test_zero3_is_configured_to_offload_and_trains_the_same(ranks: Ranks, offload: Offload) -> None:
    plain = ranks(four_steps, strategy=Strategy.ZERO3, offload=Offload.NONE)
    moved = ranks(four_steps, strategy=Strategy.ZERO3, offload=offload)
    both = offload is EVERYTHING
    assert plain[0]["policy"] == {"optimizer": False, "parameters": False}
    assert moved[0]["policy"] == {
        "offload_param": "cpu",
        **({"offload_optimizer": "cpu"} if both else {}),
        "optimizer": both,
        "parameters": True,
    }
    for before, after in zip(plain, moved, strict=True):
        assert after["losses"] == pytest.approx(before["losses"], rel=1e-6)
        assert after["norms"] == pytest.approx(before["norms"], rel=5e-6)
        assert after["weights"] == pytest.approx(before["weights"], rel=1e-6)


def resumed(root: Path, *, origin: tuple[Strategy, Offload], target: tuple[Strategy, Offload]) -> tuple[Any, Any]:
    with trained(origin[0], offload=origin[1], precision="fp16") as run:
        run.run(range(1, 3))
        checkpoints(root).save(run.prepared, description(2))
        went_on = run.run(range(3, 6))
    with trained(target[0], offload=target[1], seed=9, precision="fp16") as run:
        lineage = [LineageEntry(attempt=1, max_step=2)]
        assert checkpoints(root, lineage=lineage).load(run.prepared) is not None
        return went_on, run.run(range(3, 6))


@pytest.mark.parametrize(
    ("origin", "target"),
    [
        ((Strategy.FSDP, EVERYTHING), (Strategy.ZERO3, EVERYTHING)),
        ((Strategy.ZERO3, EVERYTHING), (Strategy.FSDP, EVERYTHING)),
        ((Strategy.DDP, Offload.NONE), (Strategy.ZERO3, Offload.PARAMETERS)),
    ],
    ids=["fsdp to zero3", "zero3 to fsdp", "ddp to zero3"],
)
def test_checkpoints_travel_to_and_from_offloaded_stages_in_fp16(
    ranks: Ranks, tmp_path: Path, origin: tuple[Strategy, Offload], target: tuple[Strategy, Offload]
) -> None:
    for went_on, again in ranks(resumed, root=tmp_path, origin=origin, target=target):
        assert again == pytest.approx(went_on, rel=3e-3)


def test_memory_is_pinned_only_where_an_accelerator_reads_it() -> None:
    from ctj_trainer.strategies.fsdp import offload_policy
    from ctj_trainer.strategies.zero3 import offload_settings

    for device, pinned in ((torch.device("cuda"), True), (CPU, False)):
        assert getattr(offload_policy(EVERYTHING, device), "pin_memory") is pinned  # noqa: B009
        assert {s["pin_memory"] for s in offload_settings(EVERYTHING, device).values()} == {pinned}
