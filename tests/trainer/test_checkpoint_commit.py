"""When a checkpoint counts: complete, undamaged, of our lineage, and not fenced off. Anything else costs one notice."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.trainer.conftest import Ranks
from tests.trainer.small import checkpoints, description, trained

from ctj_api.attempt import LineageEntry
from ctj_api.report import CheckpointRef
from ctj_api.spec import Strategy
from ctj_trainer.checkpoint import FencedError, MissingRanksError, NoCheckpointError, StorageError
from ctj_trainer.checkpoint.folders import raise_fence
from ctj_trainer.checkpoint.manifest import read_manifest


def steps_in(root: Path, attempt: int = 1) -> list[int]:
    folders = sorted((root / f"attempt-{attempt:05d}").glob("step-*"))
    return [int(folder.name.removeprefix("step-")) for folder in folders if read_manifest(folder)]


def save_steps(root: Path, steps: list[int], strategy: Strategy = Strategy.DDP, **site: Any) -> list[str]:
    notices: list[str] = []
    with trained(strategy) as run:
        for step in steps:
            checkpoints(root, notice=notices.append, **site).save(run.prepared, description(step, strategy))
    return notices


def load_from(root: Path, **site: Any) -> tuple[int | None, list[str]]:
    notices: list[str] = []
    with trained(Strategy.DDP) as run:
        found = checkpoints(root, attempt=9, notice=notices.append, **site).load(run.prepared)
    dist.barrier()
    return found.ref.step if found else None, notices


def test_the_manifest_describes_every_file(ranks: Ranks, tmp_path: Path) -> None:
    ranks(save_steps, root=tmp_path, steps=[7], strategy=Strategy.FSDP)
    folder = tmp_path / "attempt-00001" / "step-00000007"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {path.name for path in folder.iterdir()} == {*manifest["files"], "manifest.json"}
    assert manifest["files"]["__1_0.distcp"]["bytes"] == (folder / "__1_0.distcp").stat().st_size
    facts = {key: manifest[key] for key in ("step", "stage", "strategy", "worldSize", "samples", "finite")}
    assert facts == {"step": 7, "stage": "s", "strategy": "fsdp", "worldSize": 2, "samples": 56, "finite": True}


def test_no_checkpoint_and_no_floor_is_a_fresh_start(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(load_from, root=tmp_path / "not there")[0] == (None, [])


def floor_error(root: Path) -> str:
    with trained(Strategy.DDP) as run, pytest.raises(NoCheckpointError) as caught:
        checkpoints(root, floor_step=5, lineage=[LineageEntry(attempt=1, max_step=20)]).load(run.prepared)
    return str(caught.value)


def test_below_the_floor_the_attempt_fails_and_says_where_it_looked(ranks: Ranks, tmp_path: Path) -> None:
    ranks(save_steps, root=tmp_path, steps=[4])
    for message in ranks(floor_error, root=tmp_path):
        assert "no complete checkpoint at or after step 5" in message
        assert str(tmp_path) in message


def test_only_the_lineage_up_to_its_limits_is_looked_at(ranks: Ranks, tmp_path: Path) -> None:
    ranks(save_steps, root=tmp_path, steps=[4, 8])
    ranks(save_steps, root=tmp_path, steps=[6, 30], attempt=2)
    ranks(save_steps, root=tmp_path, steps=[50], attempt=3)
    lineage = [LineageEntry(attempt=1, max_step=4), LineageEntry(attempt=2, max_step=29)]
    assert ranks(load_from, root=tmp_path, lineage=lineage)[0] == (6, [])


@pytest.mark.parametrize("damage", ["cut short", "one bit", "missing", "manifest"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(ranks: Ranks, tmp_path: Path, damage: str) -> None:
    ranks(save_steps, root=tmp_path, steps=[4, 8])
    folder = tmp_path / "attempt-00001" / "step-00000008"
    victim = folder / "__1_0.distcp"
    content = bytearray(victim.read_bytes())
    match damage:
        case "cut short":
            victim.write_bytes(content[:-10])
        case "one bit":
            content[len(content) // 2] ^= 1
            victim.write_bytes(content)
        case "missing":
            victim.unlink()
        case "manifest":
            (folder / "manifest.json").write_text('{"version": 1, "step"')
    (step, notices), (other_step, silence) = ranks(
        load_from, root=tmp_path, lineage=[LineageEntry(attempt=1, max_step=8)]
    )
    assert step == other_step == 4
    assert silence == []
    if damage == "manifest":
        assert notices == []  # never committed, as far as anybody can tell
    else:
        (notice,) = notices
        assert str(folder) in notice
        assert "__1_0.distcp" in notice


def test_a_half_written_folder_is_replaced_with_one_notice(ranks: Ranks, tmp_path: Path) -> None:
    """C37, NVIDIA-NeMo/Automodel#3254: the left-over folder made one rank raise while the others hung."""
    folder = tmp_path / "attempt-00001" / "step-00000020"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"half a model")
    first, second = ranks(save_steps, root=tmp_path, steps=[10, 20])
    assert len(first) == 1
    assert str(folder) in first[0]
    assert second == []
    assert steps_in(tmp_path) == [10, 20]
    assert read_manifest(folder).files.keys() == {path.name for path in folder.iterdir()} - {"manifest.json"}


def saved_by_one_rank_only(root: Path) -> str | None:
    with trained(Strategy.DDP) as run:
        message = None
        if dist.get_rank() == 0:
            with pytest.raises(MissingRanksError) as caught:
                checkpoints(root, attempt=77, arrival_timeout_seconds=0.5).save(run.prepared, description(4))
            message = str(caught.value)
        dist.barrier()
        return message


def test_a_rank_that_saves_alone_learns_who_is_missing(ranks: Ranks, tmp_path: Path) -> None:
    """C33, deepspeedai/DeepSpeed#6836: a save inside `if main process` wrote empty shards, or hung."""
    message, _ = ranks(saved_by_one_rank_only, root=tmp_path)
    assert "checkpoint of step 4" in message
    assert "rank 1 did not come within 0.5 s" in message
    assert not (tmp_path / "attempt-00077").exists()


def save_of_half_a_model(root: Path) -> str:
    with trained(Strategy.ZERO3) as run:
        checkpoints(root).save(run.prepared, description(4))
        complete = run.prepared.state()
        run.prepared.state = lambda: complete if dist.get_rank() == 0 else {}
        with pytest.raises(StorageError) as caught:
            checkpoints(root).save(run.prepared, description(8))
        dist.barrier()
        return str(caught.value)


def test_fewer_elements_than_the_model_has_are_not_committed(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks(save_of_half_a_model, root=tmp_path):
        assert "of the model's" in message
        assert "older checkpoints are kept" in message
    assert steps_in(tmp_path) == [4]


def failing_disk(root: Path, *, number: int, on_rank: int) -> str:
    """A disk that fails in the middle of a write, on one rank only."""
    from torch.distributed.checkpoint import filesystem

    original = filesystem._write_item

    def failing(*arguments: Any, **keywords: Any) -> Any:
        if dist.get_rank() == on_rank:
            raise OSError(number, "injected")
        return original(*arguments, **keywords)

    with trained(Strategy.FSDP) as run:
        checkpoints(root).save(run.prepared, description(4))
        filesystem._write_item = failing
        try:
            with pytest.raises(StorageError) as caught:
                checkpoints(root).save(run.prepared, description(8))
        finally:
            filesystem._write_item = original
        dist.barrier()
        return str(caught.value)


@pytest.mark.parametrize(("number", "remedy"), [(errno.ENOSPC, "free space"), (errno.EROFS, "mount it writable")])
def test_a_rank_that_cannot_write_ends_all_and_the_old_checkpoint_stays(
    ranks: Ranks, tmp_path: Path, number: int, remedy: str
) -> None:
    for message in ranks(failing_disk, root=tmp_path, number=number, on_rank=1):
        assert "on rank 1" in message
        assert remedy in message
        assert "step-00000008" in message
    assert steps_in(tmp_path) == [4]
    assert not (tmp_path / "attempt-00001" / "step-00000008").exists()


def save_into_a_file(root: Path) -> str:
    with trained(Strategy.DDP) as run, pytest.raises(StorageError) as caught:
        checkpoints(root).save(run.prepared, description(8))
    return str(caught.value)


def test_an_unwritable_root_names_the_path(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "attempt-00001").write_text("not a folder")
    for message in ranks(save_into_a_file, root=tmp_path):
        assert str(tmp_path) in message
        assert "NotADirectoryError" in message or "FileExistsError" in message


def save_while_fenced(root: Path) -> str:
    with trained(Strategy.DDP) as run:
        site = checkpoints(root)
        site.claim()
        site.save(run.prepared, description(4))
        dist.barrier()
        if dist.get_rank() == 0:
            raise_fence(root, 2)
        dist.barrier()
        with pytest.raises(FencedError) as caught:
            site.save(run.prepared, description(8))
        return str(caught.value)


def test_an_older_attempt_stops_committing_once_a_newer_one_has_started(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks(save_while_fenced, root=tmp_path):
        assert "attempt 2 of this job has started" in message
    assert steps_in(tmp_path) == [4]


def test_retention_keeps_the_newest_the_pinned_and_the_replay_point(ranks: Ranks, tmp_path: Path) -> None:
    pinned = frozenset({CheckpointRef(attempt=1, step=2), CheckpointRef(attempt=1, step=5)})
    ranks(save_steps, root=tmp_path, steps=[1, 2, 3, 4, 5, 6, 7], keep=2, pinned=pinned)
    assert steps_in(tmp_path) == [2, 5, 6, 7]


def test_a_restart_of_the_same_stage_trims_what_its_predecessor_left(ranks: Ranks, tmp_path: Path) -> None:
    ranks(save_steps, root=tmp_path, steps=[1, 2, 3], keep=3)
    lineage = [LineageEntry(attempt=1, max_step=3)]
    ranks(save_steps, root=tmp_path, steps=[4, 5], keep=3, attempt=2, lineage=lineage)
    assert (steps_in(tmp_path, 1), steps_in(tmp_path, 2)) == ([3], [4, 5])


def loads_another_model(root: Path) -> str:
    from tests.trainer.small import recipe

    from ctj_trainer.checkpoint import MismatchError

    with trained(Strategy.DDP, of=recipe(key_value_heads=4)) as run, pytest.raises(MismatchError) as caught:
        checkpoints(root).load(run.prepared)
    dist.barrier()
    return str(caught.value)


def test_a_checkpoint_of_another_model_is_refused_in_one_sentence(ranks: Ranks, tmp_path: Path) -> None:
    ranks(save_steps, root=tmp_path, steps=[4])
    for message in ranks(loads_another_model, root=tmp_path):
        assert "does not fit the model" in message
        assert "k_proj" in message


def continues_with_frozen_part(strategy: Strategy, root: Path) -> bool:
    """A frozen weight has no moments; it is saved and restored like the others."""
    from dataclasses import replace

    from tests.trainer.small import recipe

    whole = recipe()

    def build() -> torch.nn.Module:
        model = whole.build_model()
        model.model.embed_tokens.weight.requires_grad_(False)
        return model

    frozen = replace(whole, build_model=build)
    with trained(strategy, of=frozen) as run:
        run.run(range(1, 3))
        checkpoints(root, strategy=strategy).save(run.prepared, description(2, strategy))
        before = run.prepared.full_weights()
        went_on = run.run(range(3, 5))
    with trained(strategy, of=frozen, seed=5) as run:
        checkpoints(root, strategy=strategy).load(run.prepared)
        after = run.prepared.full_weights()
        resumed = run.run(range(3, 5))
    return all(torch.equal(before[name], after[name]) for name in before) and resumed == pytest.approx(
        went_on, rel=1e-6
    )


@pytest.mark.parametrize("strategy", [Strategy.DDP, Strategy.FSDP, Strategy.ZERO3])
def test_frozen_weights_travel_too(ranks: Ranks, tmp_path: Path, strategy: Strategy) -> None:
    assert ranks(continues_with_frozen_part, strategy=strategy, root=tmp_path) == [True, True]
