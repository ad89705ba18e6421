"""What placement, guard, watch and probe do to a model and to the process."""

import logging
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch._dynamo
from tests.trainer.conftest import Ranks
from tests.trainer.odd_recipes import Model
from tests.trainer.stages import everyone
from torch import nn

from ctj_api.attempt import Mode
from ctj_api.spec import CompileScope, Precision, Strategy, Tolerances
from ctj_api.tolerances import limits_for
from ctj_trainer.compile.causes import Event, diagnose
from ctj_trainer.compile.guard import CompileGuard, guarded
from ctj_trainer.compile.policy import CompilePolicy
from ctj_trainer.compile.probe import Outcome, probe
from ctj_trainer.compile.regions import Placement, place
from ctj_trainer.compile.verdict import ProbeResult
from ctj_trainer.compile.watch import CompileFacts

AOT = CompilePolicy(backend="aot_eager")
TOKENS = torch.arange(12).view(2, 6)


class Plain(nn.Module):
    """Nothing in it repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Breaking(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2


def placed(
    model: nn.Module, blocks: Any, *, strategy: Strategy = Strategy.SINGLE, policy: CompilePolicy = AOT
) -> Placement:
    return place(model, list(blocks), policy=policy, strategy=strategy)


def names_stay_clean() -> None:
    for strategy in Strategy:
        model = Model("none")
        before = list(model.state_dict())
        placement = placed(model, model.blocks, strategy=strategy)
        assert list(model.state_dict()) == before
        assert placement.regions == ("blocks.0", "blocks.1")
        assert placement.eager == ("embedding", "head")


def test_blocks_are_compiled_in_place_under_every_strategy(ranks: Ranks) -> None:
    ranks(names_stay_clean)


def scopes() -> None:
    plain = placed(Plain(), [])
    assert plain.scope is CompileScope.FULL
    assert "no repeated blocks" in plain.notices[0]
    bare = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert placed(bare, list(bare)).scope is CompileScope.FULL  # compiling bare torch.nn blocks compiles nothing
    full = CompilePolicy(backend="aot_eager", scope=CompileScope.FULL)
    model = Model("none")
    assert placed(model, model.blocks, policy=full).regions == ("the whole model",)
    under_zero3 = placed(Model("none"), [], strategy=Strategy.ZERO3)
    assert under_zero3.scope is CompileScope.DISABLED
    assert "Recipe.blocks" in under_zero3.notices[0]
    model = Model("none")
    assert placed(model, model.blocks, policy=full, strategy=Strategy.ZERO3).scope is CompileScope.REGIONAL


def test_the_scope_is_what_works_and_a_change_is_said(ranks: Ranks) -> None:
    ranks(scopes)


def leaves_the_process_alone() -> None:
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    from torch._dynamo.callback import callback_handler

    def switches() -> tuple[object, ...]:
        log = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
        return (
            dynamo.suppress_errors,
            functorch.force_non_lazy_backward_lowering,
            dynamo.recompile_limit,
            torch._dynamo.eval_frame._stance.stance,
            torch._dynamo.utils._compilation_metrics.maxlen,
            (log.level, log.propagate, len(log.handlers)),
        )

    torch.compiler.set_stance("eager_on_recompile")  # the caller's own
    before = switches()
    handlers = list(callback_handler.start_callbacks)
    with guarded(on_compiling=nullcontext) as guard:
        assert dynamo.suppress_errors
        assert functorch.force_non_lazy_backward_lowering
        guard.run(Mode.EAGER)
    assert switches() == before
    torch.compiler.set_stance("default")
    assert callback_handler.start_callbacks == handlers
    module = Plain()
    module.compile(backend="aot_eager")
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    module(torch.ones(2, 4))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 1  # not forced eager any more


def test_the_guard_leaves_no_setting_behind(ranks: Ranks) -> None:
    ranks(leaves_the_process_alone)


def watched() -> tuple[CompileFacts, CompileFacts, float, list[Event]]:
    torch._dynamo.reset()
    with guarded(on_compiling=nullcontext) as guard:
        breaking, model = Breaking(), Model("counts_calls")
        breaking.compile(backend="eager")
        breaking(torch.ones(2))
        broken = guard.watch.read()
        for block in model.blocks:
            block.compile(backend="eager", recompile_limit=4)
        for _ in range(6):
            model(TOKENS)
        stormed = guard.watch.read()
        began = time.perf_counter()
        for _ in range(100):
            guard.watch.read()
        return broken, stormed, (time.perf_counter() - began) / 100, guard.watch.take()


def test_the_watch_counts_breaks_recompiles_and_limits_and_names_the_reason(ranks: Ranks) -> None:
    broken, stormed, seconds, events = ranks(watched)[0]
    assert broken.graph_breaks == 1
    assert broken.graphs == 2
    assert broken.recompiles == 0
    assert stormed.recompiles == 3
    assert stormed.limit_hits >= 1
    assert stormed.graph_breaks == 1
    assert stormed.recompiles_by == {"int_attribute": 3}
    assert broken.breaks_by == {"unsupported": 1}
    assert "integer attribute calls changes" in str(diagnose(events[0]))
    assert {event.place.function for event in events if event.place} == {"forward"}  # the limit's record names none
    assert seconds < 2e-4  # 2e-5 on an idle machine


def probed(oddity: str) -> tuple[ProbeResult, int]:
    """Probe a model of two blocks; nothing of it may move."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(oddity)
    placed(model, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters())

    def run(seed: int) -> Outcome:
        torch.manual_seed(seed)
        loss = model(TOKENS).square().sum()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.zero_grad()
        return Outcome(loss=float(loss), grad_norm=float(norm))

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.get_rng_state()
    with guarded(on_compiling=nullcontext) as guard:
        guard.attach(model)
        limits = limits_for(Tolerances(), Precision.FP32)
        result = probe(run, inner=model, guard=guard, limits=limits, ranks=everyone())
        graphs = guard.watch.read().graphs
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert torch.equal(torch.get_rng_state(), generator)
    assert not optimizer.state
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    return result, graphs


def test_the_probe_compares_and_leaves_everything_as_it_was(ranks: Ranks) -> None:
    for result, graphs in ranks(probed, oddity="statistics"):
        assert result.problem == ""
        assert result.loss_relative is not None
        assert result.loss_relative <= 1e-6
        assert graphs >= 1


def test_random_layers_are_left_out_of_the_comparison(ranks: Ranks) -> None:
    for result, _ in ranks(probed, oddity="dropout"):
        assert result.problem == ""
        assert result.loss_relative is not None
        assert result.loss_relative <= 1e-6


def nothing_to_compile() -> ProbeResult:
    model = nn.Sequential(nn.Linear(4, 4))
    model.compile(backend="aot_eager")

    def run(seed: int) -> Outcome:
        return Outcome(loss=float(seed), grad_norm=1.0)

    with guarded(on_compiling=nullcontext) as guard:
        assert isinstance(guard, CompileGuard)
        limits = limits_for(Tolerances(), Precision.FP32)
        return probe(run, inner=model, guard=guard, limits=limits, ranks=everyone())


def test_a_model_of_which_nothing_was_captured_is_never_called_compiled(ranks: Ranks) -> None:
    for result in ranks(nothing_to_compile):
        assert result.problem.startswith("nothing_compiled")
