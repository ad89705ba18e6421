"""Checkpoints behind a URL keep the promises of those on a volume: commit, fence, retention, the older sound one."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.trainer.bucket import register, url_of
from tests.trainer.conftest import Ranks
from tests.trainer.messages import attempt
from tests.trainer.small import checkpoints, description, trained
from tests.trainer.stages import run

from ctj_api.attempt import LineageEntry
from ctj_api.spec import Strategy
from ctj_trainer.checkpoint import FencedError
from ctj_trainer.checkpoint.folders import committed_in, raise_fence
from ctj_trainer.checkpoint.storage import UrlPath

SCHEMES = ["file", "bucket"]


def root_at(folder: Path, scheme: str) -> UrlPath:
    register()
    return UrlPath(url_of(folder) if scheme == "bucket" else f"file://{folder}")


def steps_in(root: UrlPath) -> list[int]:
    return [found.ref.step for found in committed_in(root, 1)]


def saves_and_resumes(folder: Path, scheme: str) -> dict[str, Any]:
    root = root_at(folder, scheme)
    notices: list[str] = []
    lineage = [LineageEntry(attempt=1, max_step=9)]
    with trained(Strategy.FSDP) as one:
        site = checkpoints(root, keep=2, notice=notices.append)
        site.claim()
        for step in (1, 2, 3):
            one.run(range(step, step + 1))
            site.save(one.prepared, description(step))
        dist.barrier()  # the first rank deletes what is superseded
        kept = steps_in(root)
        went_on = one.run(range(4, 6))
    resumed = {}
    for strategy in (Strategy.DDP, Strategy.ZERO3):
        with trained(strategy, seed=9) as one:
            found = checkpoints(root, attempt=2, strategy=strategy, lineage=lineage).load(one.prepared)
            resumed[strategy.value] = (found.ref.step if found else None, one.run(range(4, 6)))
    dist.barrier()
    if dist.get_rank() == 0:
        victim = folder / "attempt-00001" / "step-00000003" / "__1_0.distcp"
        victim.write_bytes(victim.read_bytes()[:-10])
    dist.barrier()
    with trained(Strategy.DDP) as one:
        found = checkpoints(root, attempt=2, lineage=lineage, notice=notices.append).load(one.prepared)
        fallback = found.ref.step if found else None
        fenced = checkpoints(root)
        dist.barrier()
        if dist.get_rank() == 0:
            raise_fence(root, 2)
        dist.barrier()
        with pytest.raises(FencedError):
            fenced.save(one.prepared, description(4))
    return {"kept": kept, "went on": went_on, "resumed": resumed, "fallback": fallback, "notices": notices}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_store_keeps_the_promises_of_a_volume(ranks: Ranks, tmp_path: Path, scheme: str) -> None:
    for rank, found in enumerate(ranks(saves_and_resumes, folder=tmp_path, scheme=scheme)):
        assert found["kept"] == [2, 3]
        for step, losses in found["resumed"].values():
            assert step == 3
            assert losses == pytest.approx(found["went on"], rel=1e-6)
        assert found["fallback"] == 2
        assert [n for n in found["notices"] if "__1_0.distcp" in n] if rank == 0 else found["notices"] == []
    assert not (tmp_path / "attempt-00001" / "step-00000004").exists()


def in_memory() -> tuple[list[int], list[float], list[float]]:
    """One process alone: the store lives in its memory."""
    root = UrlPath(f"memory://checkpoints-{dist.get_rank()}")
    with trained(Strategy.SINGLE) as one:
        site = checkpoints(root, strategy=Strategy.SINGLE, keep=1)
        site.claim()
        for step in (1, 2):
            one.run(range(step, step + 1))
            site.save(one.prepared, description(step, Strategy.SINGLE))
        went_on = one.run(range(3, 5))
    with trained(Strategy.SINGLE, seed=9) as one:
        checkpoints(root, strategy=Strategy.SINGLE).load(one.prepared)
        return steps_in(root), went_on, one.run(range(3, 5))


def test_a_store_without_folders_or_files_works_too(ranks: Ranks) -> None:
    for kept, went_on, resumed in ranks(in_memory):
        assert kept == [2]
        assert resumed == pytest.approx(went_on, rel=1e-6)


def test_a_stage_puts_checkpoints_into_its_own_part_of_the_store_and_records_on_the_volume(
    ranks: Ranks, tmp_path: Path
) -> None:
    store, volume = tmp_path / "store", tmp_path / "volume"
    training = {"checkpoint": {"everySteps": 2, "url": f"file://{store}"}}
    document = attempt(end=4, mode="Eager", training=training)
    first = ranks(run, document=document, root=str(volume))[0]
    own = store / "default" / "job-u"
    assert (own / "attempt-00001" / "step-00000004" / "manifest.json").exists()
    assert (volume / "attempt-00001" / "steps.jsonl").exists()
    assert not list(volume.glob("attempt-00001/step-*"))
    again = document | {"attempt": 2, "lineage": [{"attempt": 1, "maxStep": 2}]}
    second = ranks(run, document=again, root=str(volume), name="again")[0]
    assert list(second["records"]) == [3, 4]
    assert [second["records"][s]["loss"] for s in (3, 4)] == [first["records"][s]["loss"] for s in (3, 4)]
