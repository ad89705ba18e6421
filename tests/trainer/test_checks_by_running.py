"""Checks that run a model once: FSDP's contract, gradients under autocast, tracing, dropout's budget, consistency."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.trainer import unready_models as m
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from ctj_trainer.checks import boundary, consistency, fsdp, parity
from ctj_trainer.checks.finding import Finding, Rule, Verdict, violations
from ctj_trainer.checks.trial import Trial

X = torch.linspace(-1, 1, 16).view(2, 8)
LENGTHS = torch.tensor([1, 1])

# -- FSDP


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(m.Ready() for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Tied(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Linear(8, 8)
        self.tail.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(super().forward(x))


class CallsForward(Stack):
    """Skips the hooks of its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return self.head(x)


class ReadsWeights(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.blocks[0].linear.weight


class UsesPartFirst(Stack):
    """Runs a layer of a block outside of the block."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.blocks[1].linear(x))


def blocks_and_root(model: Any) -> None:
    fsdp.shard(lambda model: list(model.blocks))(model)


def only_blocks(model: Any) -> None:
    for block in model.blocks:
        fully_shard(block)


def ignoring_head(model: Any) -> None:
    fully_shard(model, ignored_params=set(model.head.parameters()))


def registered_afterwards(model: Any) -> None:
    blocks_and_root(model)
    model.register_parameter("late", nn.Parameter(torch.ones(8)))


def keeping_blocks(model: Any) -> None:
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=False)
    fully_shard(model)


def keeping_first(model: Any) -> None:
    fully_shard(model.blocks[0], reshard_after_forward=False)
    fully_shard(model.blocks[1])
    fully_shard(model)


def keeping_head(model: Any) -> None:
    fully_shard(model.head, reshard_after_forward=False)
    blocks_and_root(model)


def without_sync(model: Any) -> None:
    blocks_and_root(model)
    model.set_requires_gradient_sync(False)


def without_sync_of_a_block(model: Any) -> None:
    blocks_and_root(model)
    model.blocks[0].set_requires_gradient_sync(False)


class SparesHead(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


BROKEN: list[tuple[Rule, type[nn.Module], Callable[[Any], None], str]] = [
    (fsdp.MANAGED, Stack, only_blocks, "head.weight"),
    (fsdp.MANAGED, Stack, ignoring_head, "head.weight"),
    (fsdp.MANAGED, Stack, registered_afterwards, "late"),
    (fsdp.GATHERED, CallsForward, blocks_and_root, "blocks.0.layers.0.weight"),
    (fsdp.GATHERED, ReadsWeights, blocks_and_root, "ReadsWeights"),
    (fsdp.GATHERED, UsesPartFirst, blocks_and_root, "blocks.1.linear.weight"),
    (fsdp.RESHARDED, Stack, keeping_blocks, "blocks.0"),
    (fsdp.RESHARDED, Stack, keeping_first, "blocks.0"),
    (fsdp.RESHARDED, Stack, keeping_head, "head"),
    (fsdp.SYNCHRONISED, Stack, without_sync, "head.weight"),
    (fsdp.SYNCHRONISED, Stack, without_sync_of_a_block, "blocks.0.linear.weight"),
    (fsdp.SYNCHRONISED, SparesHead, blocks_and_root, "head.weight"),
]


@pytest.mark.parametrize(("rule", "kind", "layout", "named"), BROKEN)
def test_a_broken_fsdp_contract_names_the_parameter(rule: Rule, kind: Any, layout: Any, named: str) -> None:
    found = violations(fsdp.check_fsdp(Trial.of(kind, X), layout))
    assert named in [finding.subject for finding in found if finding.rule == rule.name]


def test_an_unmanaged_parameter_is_reported_in_those_words() -> None:
    found = violations(fsdp.check_fsdp(Trial.of(Stack, X), only_blocks))
    assert found[0].evidence.startswith("parameter not managed by FSDP: head.weight (64 elements")


@pytest.mark.parametrize("kind", [Stack, Tied])
def test_a_model_in_the_trainers_own_layout_keeps_the_contract(kind: Any) -> None:
    findings = fsdp.check_fsdp(Trial.of(kind, X), blocks_and_root)
    assert violations(findings) == []
    assert [f.rule for f in findings] == [
        r.name for r in (fsdp.MANAGED, fsdp.GATHERED, fsdp.RESHARDED, fsdp.SYNCHRONISED)
    ]


# -- gradients under autocast (C17)


class MatmulInFloat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x.float() @ self.weight


class LinearInFloat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(64, 64)
        self.outer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = self.inner(x)
        return self.outer(y)


class AttentionInFloat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            q = F.linear(x.float(), self.query.weight)
            return F.softmax(q @ x.float().T, -1) @ x.float()


class CastsExplicitly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)).float() * 2


class Normalises(CastsExplicitly):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(self.linear(x).float(), (64,))


def wide() -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def squared(build: Any) -> Trial:
    """A loss whose gradient depends on every element."""
    trial = Trial.of(build, wide())
    return Trial(
        build=trial.build,
        loss=lambda model: trial.call(model).float().square().sum(),
        arguments=trial.arguments,
        keywords=trial.keywords,
    )


@pytest.mark.parametrize(
    ("kind", "named"), [(MatmulInFloat, "weight"), (LinearInFloat, "inner.weight"), (AttentionInFloat, "query.weight")]
)
def test_c17_gradients_of_an_inner_autocast_block_are_named(kind: Any, named: str) -> None:
    found = violations(parity.check_gradients(squared(kind)))
    assert named in [finding.subject for finding in found]
    assert "test_checks_by_running.py:" in found[0].location  # the autocast block itself


@pytest.mark.parametrize("kind", [CastsExplicitly, Normalises])
def test_gradients_without_inner_autocast_agree(kind: Any) -> None:
    (finding,) = parity.check_gradients(squared(kind))
    assert finding.verdict is Verdict.COMPLIANT


# -- dropout under a memory budget (C21)


class FunctionalDropout(m.Ready):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return F.dropout(self.linear(x), 0.5)


class Noisy(m.Ready):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.linear(x) + torch.randn_like(x)


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))


@pytest.mark.parametrize(
    ("build", "operation"),
    [(with_dropout, "1 (Dropout)"), (FunctionalDropout, "F.dropout"), (Noisy, "torch.randn_like")],
)
def test_c21_a_budget_under_one_is_refused_where_random_numbers_are_drawn(build: Any, operation: str) -> None:
    trial = Trial.of(build, X)
    (finding,) = parity.check_memory_budget(trial, budget=0.5)
    assert finding.verdict is Verdict.VIOLATING
    assert operation in finding.subject
    assert "1.0" in finding.remedy
    assert parity.check_memory_budget(trial, budget=1.0)[0].verdict is Verdict.COMPLIANT


def test_c21_without_random_operations_any_budget_passes() -> None:
    for build in (m.Ready, lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0))):
        (finding,) = parity.check_memory_budget(Trial.of(build, X), budget=0.0)
        assert finding.verdict is Verdict.NOT_APPLICABLE


# -- tracing


@pytest.mark.parametrize(
    ("build", "arguments"),
    [(m.BranchesOnSum, (X,)), (m.LoopsUntilSmall, (X,)), (m.RaisesOnNan, (X,))],
)
def test_what_cannot_be_traced_is_named_with_its_line(build: Any, arguments: tuple[Tensor, ...]) -> None:
    trial = Trial.of(build, *arguments)
    for check in (boundary.check_shape_inference, boundary.check_export):
        (finding,) = check(trial)
        assert finding.verdict is Verdict.VIOLATING
        assert "unready_models.py:" in finding.location
    found = violations(boundary.check_capture(trial))
    assert found[0].evidence.startswith(("the graph ends here", "0 graphs"))


def test_a_number_read_from_a_tensor_ends_shape_inference_and_the_graph() -> None:
    trial = Trial.of(m.LongestOfPacked, X, LENGTHS)
    (finding,) = boundary.check_shape_inference(trial)
    assert finding.verdict is Verdict.VIOLATING
    assert "item" in violations(boundary.check_capture(trial))[0].evidence


@pytest.mark.parametrize("build", m.READY)
def test_a_ready_model_traces_every_way(build: Any) -> None:
    assert violations(boundary.check_boundary(Trial.of(lambda: build().eval(), X))) == []


# -- consistency


class MakesOnMeta(m.Ready):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(8, device="meta"))


class MetaInput(m.Ready):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.linear(x.to("meta"))


def half_on_meta() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2, device="meta"))


class DoubleInput(m.Ready):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.linear(x.double())


class HalfNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


def half_head() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2).bfloat16())


class TransposedInput(m.Ready):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.linear(x.expand(8, 8).t())


class EverySecond(m.Ready):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.linear(torch.cat([x, x], -1)[:, ::2])


def transposed_weight() -> nn.Module:
    model = m.Ready()
    model.linear.weight = nn.Parameter(model.linear.weight.detach().t())
    return model


INCONSISTENT: list[tuple[Rule, Any, Tensor, str]] = [
    (consistency.DEVICE, MakesOnMeta, X, "table"),
    (consistency.DEVICE, MetaInput, X, "input of linear"),
    (consistency.DEVICE, half_on_meta, X, "1.weight"),
    (consistency.DTYPE, DoubleInput, X, "linear"),
    (consistency.DTYPE, HalfNorm, X, "norm"),
    (consistency.DTYPE, half_head, X, "1"),
    (consistency.CONTIGUITY, TransposedInput, X[:1], "input of linear"),
    (consistency.CONTIGUITY, EverySecond, X, "input of linear"),
    (consistency.CONTIGUITY, transposed_weight, X, "linear.weight"),
]


@pytest.mark.parametrize(("rule", "build", "given", "named"), INCONSISTENT)
def test_a_mismatch_is_named(rule: Rule, build: Any, given: Tensor, named: str) -> None:
    found = violations(consistency.check_consistency(Trial.of(build, given)))
    assert named in [finding.subject for finding in found if finding.rule == rule.name]


@pytest.mark.parametrize("build", m.READY)
def test_consistent_models_pass(build: Any) -> None:
    findings: list[Finding] = consistency.check_consistency(Trial.of(build, X))
    assert violations(findings) == []
    assert len(findings) == 3
