"""What a stage checks by itself reaches its report, and changes nothing else."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.trainer.conftest import Ranks
from tests.trainer.messages import attempt
from tests.trainer.stages import everyone, run
from tests.trainer.unready_models import Ready
from torch import nn
from torch.distributed.fsdp import fully_shard

from ctj_api.report import Report
from ctj_api.spec import Strategy
from ctj_trainer.checks.at_start import first_shapes, problems_at_start


def hooked(**config: bool) -> dict[str, Any]:
    return {"name": "tests.trainer.hooked_recipe:build", "config": {"hooks": False, "late": False} | config}


def report_of(root: Path) -> Report:
    return Report.model_validate_json((root / "run" / "report.json").read_text())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_job_excludes_hooks_compiles_around_them_and_says_so(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    plain = ranks(run, document=attempt(strategy, end=6, recipe=hooked()), root=str(tmp_path / "plain"))[0]
    result = ranks(run, document=attempt(strategy, end=6, recipe=hooked(hooks=True)), root=str(tmp_path / "hooked"))[0]
    report = report_of(tmp_path / "hooked")
    assert report.mode == "Compiled", report.compile
    assert report.measurements["graphBreaks"] == 0
    assert any(notice.endswith("more") and "kept eager" in notice for notice in report.notices), report.notices
    assert not any("kept eager" in notice for notice in report_of(tmp_path / "plain").notices)
    losses = [[r["loss"] for _, r in sorted(done["records"].items())] for done in (plain, result)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
def test_the_hooks_of_the_strategy_itself_are_no_problem(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    ranks(run, document=attempt(strategy, end=6, recipe=hooked()), root=str(tmp_path))
    assert not [n for n in report_of(tmp_path).notices if "offload" in n or "hook" in n]


def test_a_hook_added_while_training_is_told(ranks: Ranks, tmp_path: Path) -> None:
    ranks(run, document=attempt("ddp", end=6, recipe=hooked(late=True)), root=str(tmp_path))
    (told,) = [n for n in report_of(tmp_path).notices if "changed after the first compiled call" in n]
    assert told.startswith("hooks of blocks.0.linear changed")
    assert "never fires" in told


def shapes_and_management() -> None:
    from tests.trainer.small import recipe, training

    same = first_shapes(recipe(), training(), ranks=everyone(), micro_batch_size=2)
    assert len(same) == 2
    assert problems_at_start(Ready(), Strategy.DDP, shapes=same) == []
    own = dataclasses.replace(recipe(), samples=_Ragged(dist.get_rank()))
    (problem,) = problems_at_start(
        Ready(), Strategy.DDP, shapes=first_shapes(own, training(), ranks=everyone(), micro_batch_size=2)
    )
    assert problem.startswith("ddp: batch 0: ranks get tensors of other rank or dtype")
    model = nn.Sequential(Ready(), Ready())
    fully_shard(model[0])
    problems = problems_at_start(model, Strategy.FSDP, shapes=[])
    assert len(problems) == 3
    assert problems[0].startswith("fsdp: parameter not managed by FSDP: 1.linear.weight")
    assert len(problems[0]) <= 300


class _Ragged:
    def __init__(self, rank: int) -> None:
        self._dtype = torch.int64 if rank == 0 else torch.int32

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.full((8,), index, dtype=self._dtype)}


def test_shapes_across_ranks_and_unmanaged_parameters_are_judged_at_start(ranks: Ranks) -> None:
    ranks(shapes_and_management)
