"""DDP compliance as a table of compliant and violating: each rule is broken by three or more and kept by two."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.trainer.unready_models import Ready, ReadyAttention
from torch import Tensor, nn

from ctj_trainer.checks import ddp
from ctj_trainer.checks.ddp import (
    Collective,
    Dealing,
    judge_apart,
    judge_phases,
    judge_shapes,
    judge_split,
    judge_unused,
)
from ctj_trainer.checks.ddp_trial import check_ddp, count_graphs, observe_phases, unused_parameters
from ctj_trainer.checks.finding import Finding, Verdict, violations
from ctj_trainer.checks.group import alone
from ctj_trainer.checks.source import forward_sources
from ctj_trainer.checks.trial import Trial

X = torch.linspace(-1, 1, 16).view(2, 8)
READY = [Trial.of(Ready, X), Trial.of(ReadyAttention, X)]


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.spare = nn.Linear(8, 8)


class ReducesInForward(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.spare(self.linear(x))
        dist.all_reduce(y.detach())
        return y


class GathersInForward(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.spare(self.linear(x))
        parts = [torch.zeros_like(y) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, y.detach().contiguous())
        return y + parts[0]


class ReducesFunctionally(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        import torch.distributed._functional_collectives as collectives

        mean = collectives.all_reduce(x.mean(0), "sum", dist.group.WORLD)
        return self.spare(self.linear(x - mean))


@pytest.mark.parametrize(
    ("kind", "operation"),
    [(ReducesInForward, "allreduce"), (GathersInForward, "allgather"), (ReducesFunctionally, "all_reduce")],
)
def test_a_collective_in_forward_is_named(kind: type[nn.Module], operation: str) -> None:
    with alone():
        seen, buckets = observe_phases(Trial.of(kind, X))
    found = violations(judge_phases(seen, buckets=buckets))
    assert any(f"x {operation} during forward" in finding.evidence for finding in found)


@pytest.mark.parametrize("trial", READY)
def test_gradients_of_a_plain_model_are_reduced_in_backward(trial: Trial) -> None:
    with alone():
        seen, buckets = observe_phases(trial)
    assert buckets >= 1
    assert {c.phase for c in seen if c.operation == "gradient bucket"} == {"backward"}
    (finding,) = judge_phases(seen, buckets=buckets)
    assert finding.verdict is Verdict.COMPLIANT


def test_a_bucket_reduced_in_forward_would_be_violating() -> None:
    (finding,) = judge_phases([Collective(operation="gradient bucket", phase="forward")], buckets=1)
    assert finding.verdict is Verdict.VIOLATING


def test_a_frozen_model_is_not_judged() -> None:
    with alone():
        seen, buckets = observe_phases(Trial.of(lambda: Ready().requires_grad_(False), X))
    assert [f.verdict for f in judge_phases(seen, buckets=buckets)] == [Verdict.NOT_APPLICABLE]


class PenalisesGradient(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = self.linear(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + self.spare(slope)


class TrainsInside(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        F.mse_loss(self.linear(x), x).backward()
        return self.spare(x)


@pytest.mark.parametrize(
    ("settings", "kind", "evidence"),
    [
        ({"compiled_autograd": True}, Ready, "compiled_autograd"),
        ({"optimize_ddp": "python_reducer"}, Ready, "python_reducer"),
        ({"optimize_ddp": "python_reducer_without_compiled_forward"}, Ready, "python_reducer"),
        ({}, PenalisesGradient, "torch.autograd.grad"),
        ({}, TrainsInside, "backward()"),
    ],
)
def test_what_merges_forward_and_backward_is_named(settings: dict[str, Any], kind: Any, evidence: str) -> None:
    (finding,) = judge_apart(forward=1, backward=1, settings=settings, sources=forward_sources(kind()))
    assert finding.verdict is Verdict.VIOLATING
    assert evidence in finding.evidence


@pytest.mark.parametrize("trial", READY)
def test_forward_and_backward_of_a_plain_model_are_two_graphs(trial: Trial) -> None:
    forward, backward = count_graphs(trial)
    assert (forward, backward) == (1, 1)
    (finding,) = judge_apart(forward=forward, backward=backward, settings={}, sources=forward_sources(trial.build()))
    assert finding.verdict is Verdict.COMPLIANT


def batches(*shapes: tuple[int, ...], dtype: str = "torch.int64") -> list[ddp.Signature]:
    return [((shape, dtype),) for shape in shapes]


SAME = batches((4, 16), (4, 16))
SHAPES: list[tuple[str, list[list[ddp.Signature]], bool | None]] = [
    ("batches per rank", [SAME, SAME[:1]], None),
    ("other rank or dtype", [SAME, batches((4, 16), (4, 16, 1))], None),
    ("other rank or dtype", [SAME, batches((4, 16), (4, 16), dtype="torch.int32")], None),
    ("0 or 1 on some ranks", [SAME, batches((4, 16), (1, 16))], None),
    ("dynamic off", [batches((4, 16), (4, 20)), batches((4, 16), (4, 24))], False),
]


@pytest.mark.parametrize(("evidence", "ranks", "dynamic"), SHAPES)
def test_inconsistent_shapes_are_violating(evidence: str, ranks: Any, dynamic: bool | None) -> None:
    (finding,) = judge_shapes(ranks, dynamic=dynamic)
    assert finding.verdict is Verdict.VIOLATING
    assert evidence in finding.evidence


@pytest.mark.parametrize(
    ("ranks", "dynamic"), [([SAME, SAME], False), ([batches((4, 16), (4, 20)), batches((4, 24), (4, 8))], None)]
)
def test_equal_shapes_and_varying_ones_under_dynamic_are_compliant(ranks: Any, dynamic: bool | None) -> None:
    (finding,) = judge_shapes(ranks, dynamic=dynamic)
    assert finding.verdict is Verdict.COMPLIANT


class Unused(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class RoutesByBatch(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.shape[0] > 1 else self.spare(x)


def unused(kind: Any) -> list[frozenset[str]]:
    return [unused_parameters(Trial.of(kind, X)), unused_parameters(Trial.of(kind, X[:1]))]


@pytest.mark.parametrize(
    ("kind", "flags", "evidence"),
    [
        (Unused, {"find_unused": False}, "get no gradient"),
        (Ready, {"find_unused": True}, "every parameter had a gradient"),
        (Unused, {"find_unused": True}, "always the same 2 parameters"),
        (RoutesByBatch, {"find_unused": False, "static_graph": True}, "static_graph is on"),
    ],
)
def test_a_wrong_find_unused_parameters_is_violating(kind: Any, flags: dict[str, bool], evidence: str) -> None:
    (finding,) = judge_unused(unused(kind), **flags)  # type: ignore[arg-type]
    assert finding.verdict is Verdict.VIOLATING
    assert evidence in finding.evidence


@pytest.mark.parametrize(("kind", "find_unused"), [(Ready, False), (RoutesByBatch, True)])
def test_a_right_find_unused_parameters_is_compliant(kind: Any, find_unused: bool) -> None:
    (finding,) = judge_unused(unused(kind), find_unused=find_unused)
    assert finding.verdict is Verdict.COMPLIANT


@pytest.mark.parametrize(
    ("facts", "evidence"),
    [
        ({"num_samples": 64, "batch_size": 6, "world_size": 4, "split_batches": True}, "by 4 processes"),
        (
            {"num_samples": 30, "batch_size": 4, "world_size": 4, "split_batches": False, "even_batches": False},
            "14 of 16 samples",
        ),
        ({"num_samples": 3, "batch_size": 4, "world_size": 2, "split_batches": False}, "do not fill one round"),
    ],
)
def test_uneven_batches_are_violating(facts: dict[str, Any], evidence: str) -> None:
    (finding,) = judge_split(Dealing(**facts))
    assert finding.verdict is Verdict.VIOLATING
    assert evidence in finding.evidence


@pytest.mark.parametrize(
    "facts",
    [
        {"num_samples": 64, "batch_size": 8, "world_size": 4, "split_batches": True},
        {
            "num_samples": 30,
            "batch_size": 4,
            "world_size": 4,
            "split_batches": False,
            "even_batches": False,
            "drop_last": True,
        },
    ],
)
def test_even_batches_are_compliant(facts: dict[str, Any]) -> None:
    (finding,) = judge_split(Dealing(**facts))
    assert finding.verdict is Verdict.COMPLIANT


def test_the_whole_table_of_a_good_model_is_compliant() -> None:
    findings: list[Finding] = check_ddp([READY[0]])
    assert violations(findings) == []
    assert [f.rule for f in findings] == [ddp.PHASES.name, ddp.APART.name, ddp.UNUSED.name]
