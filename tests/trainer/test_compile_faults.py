"""What torch itself says when something goes wrong, provoked here, and which regions are then left eager."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import torch._dynamo
from tests.trainer.conftest import Ranks
from tests.trainer.stages import everyone
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from ctj_api.attempt import Mode
from ctj_api.spec import Precision, Tolerances
from ctj_api.tolerances import limits_for
from ctj_trainer.compile.causes import Diagnosis, Event, EventKind, diagnose
from ctj_trainer.compile.complaint import about_failures
from ctj_trainer.compile.guard import guarded
from ctj_trainer.compile.notices import Notices
from ctj_trainer.compile.probe import Outcome, probe
from ctj_trainer.compile.storm import StormRule
from ctj_trainer.compile.verdict import ProbeResult

ONES = torch.ones(2, 4)


class Layer(nn.Module):
    """A linear layer around which one thing is odd."""

    def __init__(self, odd: Callable[["Layer", Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.odd = odd
        self.step = 0
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.odd(self, y) if self.odd else y


def counts(layer: Layer, y: Tensor) -> Tensor:
    layer.step += 1
    return y * layer.step


def compares_its_size(layer: Layer, y: Tensor) -> Tensor:
    return y + 1 if y.shape[0] == 4 else y


def drops(layer: Layer, y: Tensor) -> Tensor:
    return layer.dropout(y)


def branches(layer: Layer, y: Tensor) -> Tensor:
    return y * 2 if y.sum() > 0 else y


def takes_an_item(layer: Layer, y: Tensor) -> Tensor:
    return y * int(y.max().item())


def enters_autocast_by_hand(layer: Layer, y: Tensor) -> Tensor:
    context = torch.autocast("cpu", dtype=torch.bfloat16)
    context.__enter__()
    z = y @ y.T
    context.__exit__(None, None, None)
    return z


def calls_an_op_without_a_fake(layer: Layer, y: Tensor) -> Tensor:
    return torch.ops.ctj_tests.nofake(y)


def has_mismatched_shapes(layer: Layer, y: Tensor) -> Tensor:
    return y @ torch.ones(7, 7)


@cache
def define_op() -> None:
    torch.library.custom_op("ctj_tests::nofake", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")


def raises(error: Exception) -> Callable[..., Any]:
    def backend(*_: Any) -> Any:
        raise error

    return backend


def provoked(
    layer: Layer, *, backend: Any = "eager", calls: int = 1, before: Callable[[Layer, int], Any] | None = None
) -> list[Diagnosis]:
    """Compile and call `layer`; every diagnosis of what then happened, breaks included."""
    torch._dynamo.reset()
    with guarded(on_compiling=nullcontext) as guard:
        layer.compile(backend=backend)
        guard.attach(layer)
        for call in range(calls):
            size = before(layer, call) if before else None
            try:
                layer(torch.ones(size or 2, 4)).sum().backward()
            except RuntimeError as error:
                guard.watch.read()
                return [diagnose(event) for event in guard.watch.take()] or [
                    diagnose(Event(kind=EventKind.RAISED, text=str(error), error=type(error).__name__))
                ]
        guard.watch.read()
        return [diagnose(event) for event in (*guard.watch.take(), *guard.breaks)]


def set_sizes(layer: Layer, call: int) -> int:
    return (2, 3, 4)[call]


def flip_threads(layer: Layer, call: int) -> None:
    torch.set_num_threads(1 + call)


def flip_mode(layer: Layer, call: int) -> None:
    layer.train(call == 0)


def flip_autocast(layer: Layer, call: int) -> None:
    torch.set_autocast_enabled("cpu", bool(call))


def recomputed_after_a_flip() -> list[Diagnosis]:
    torch._dynamo.reset()
    layer = Layer(lambda _, y: y.relu().exp())
    layer.compile(backend="aot_eager")
    out = checkpoint(layer, ONES.clone().requires_grad_(), use_reentrant=False)
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError) as caught:
        out.sum().backward()
    return [diagnose(Event(kind=EventKind.RAISED, text=str(caught.value), error=type(caught.value).__name__))]


def lazy_backward() -> list[Diagnosis]:
    torch._dynamo.reset()
    layer = Layer()
    with guarded(on_compiling=nullcontext) as guard:
        torch._functorch.config.force_non_lazy_backward_lowering = False
        layer.compile(backend=aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=raises(RuntimeError("no"))))
        with pytest.raises(RuntimeError):
            layer(ONES).sum().backward()
        guard.watch.read()
        return [diagnose(event) for event in guard.watch.take()]


def hooked() -> list[Diagnosis]:
    layer = Layer()
    layer.linear.register_forward_pre_hook(torch.compiler.disable(lambda *_: None))
    return provoked(layer)


def every_fault() -> dict[str, list[tuple[str, str]]]:
    define_op()
    threads = torch.get_num_threads()
    found = {
        "counts": provoked(Layer(counts), calls=3),
        "sizes": provoked(Layer(compares_its_size), calls=3, before=set_sizes),
        "threads": provoked(Layer(), calls=2, before=flip_threads),
        "mode": provoked(Layer(drops), calls=2, before=flip_mode),
        "autocast": provoked(Layer(), calls=2, before=flip_autocast),
        "branch": provoked(Layer(branches)),
        "item": provoked(Layer(takes_an_item)),
        "by_hand": provoked(Layer(enters_autocast_by_hand), backend="aot_eager"),
        "no_fake": provoked(Layer(calls_an_op_without_a_fake), backend="aot_eager"),
        "mistake": provoked(Layer(has_mismatched_shapes)),
        "no_compiler": provoked(Layer(), backend=raises(RuntimeError("no compiler\nin this image"))),
        "memory": provoked(Layer(), backend=raises(torch.OutOfMemoryError("CUDA out of memory. Tried 20 MiB"))),
        "slow": provoked(Layer(), backend=raises(TimeoutError("ptxas did not end"))),
        "lowering": provoked(Layer(), backend=raises(AssertionError("buf12"))),
        "recompute": recomputed_after_a_flip(),
        "lazy": lazy_backward(),
        "hook": hooked(),
    }
    torch.set_num_threads(threads)
    torch.set_autocast_enabled("cpu", False)
    return {name: [(str(d.fault), d.cause) for d in diagnoses] for name, diagnoses in found.items()}


@pytest.fixture(scope="module")
def faults(ranks: Ranks) -> dict[str, list[tuple[str, str]]]:
    return ranks(every_fault)[0]


@pytest.mark.parametrize(
    ("name", "fault", "said"),
    [
        ("counts", "int_attribute", "integer attribute step changes (guarded on 0) at "),
        ("sizes", "shape", "size of x changes at index 0. expected 2, actual 3"),
        ("threads", "global_state", "global state changed: num_threads"),
        ("mode", "global_state", "train and eval mode alternate"),
        ("autocast", "autocast", "autocast is on in one call and off in another"),
        ("branch", "data_dependent_flow", "in branches"),
        ("item", "data_dependent_flow", "Tensor.item() on a value that is known only at run time"),
        ("by_hand", "autocast", "autocast"),
        ("no_fake", "missing_op", "op ctj_tests::nofake has no fake"),
        ("mistake", "user_code", "fake tensor"),
        ("no_compiler", "toolchain", "no compiler in this image"),
        ("memory", "out_of_memory", "CUDA out of memory"),
        ("slow", "timeout", "did not end"),
        ("lowering", "backend", "buf12"),
        ("recompute", "activation_checkpoint", "different metadata"),
        ("lazy", "lazy_backward", "RuntimeError: no"),
        ("hook", "hook", "torch.compiler.disable"),
    ],
)
def test_what_torch_says_is_classified_with_its_place(
    faults: dict[str, list[tuple[str, str]]], name: str, fault: str, said: str
) -> None:
    matching = [cause for found, cause in faults[name] if found == fault]
    assert matching, faults[name]
    assert said in matching[0]
    if name not in ("recompute",):
        assert "test_compile_faults.py:" in matching[0]


class Even(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x - torch.sigmoid(self.linear(x))


class Mixed(nn.Module):
    """Blocks of two classes in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Odd() if index % 2 else Even() for index in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def spoils(graph: Any, inputs: Any, *, how: Callable[[Any], Any]) -> Any:
    """A backend that does `how` to graphs of Odd and nothing to others."""
    return how(graph) if "sigmoid" in graph.code else graph


def fails_on_odd(graph: Any, inputs: Any) -> Any:
    return spoils(graph, inputs, how=lambda _: raises(RuntimeError("no compiler"))())


def is_wrong_on_odd(graph: Any, inputs: Any) -> Any:
    return spoils(graph, inputs, how=lambda g: lambda *a: tuple(out * 1.01 for out in g(*a)))


def gives_nan_on_odd(graph: Any, inputs: Any) -> Any:
    return spoils(graph, inputs, how=lambda g: lambda *a: tuple(out * float("nan") for out in g(*a)))


def mixed(backend: str) -> tuple[ProbeResult, tuple[str, ...], tuple[str, ...], bool]:
    """Probe a model of which one class goes wrong; is the result of a step afterwards that of eager?"""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Mixed()
    for block in model.blocks:
        block.compile(backend=globals()[backend])

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(ONES).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def run(seed: int) -> Outcome:
        loss = model(ONES).square().sum()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        return Outcome(loss=float(loss), grad_norm=float(norm))

    with guarded(on_compiling=nullcontext) as guard:
        guard.attach(model)
        limits = limits_for(Tolerances(), Precision.FP32)
        result = probe(run, inner=model, guard=guard, limits=limits, ranks=everyone())
        compiled = gradients()
        guard.run(Mode.EAGER)
        equal = all(torch.equal(a, b) for a, b in zip(compiled, gradients(), strict=True))
        return result, guard.regions.compiled, guard.regions.eager, equal


@pytest.mark.parametrize(
    ("backend", "fault"),
    [("fails_on_odd", "toolchain"), ("is_wrong_on_odd", "numerics"), ("gives_nan_on_odd", "numerics")],
)
def test_only_the_regions_that_misbehave_are_left_eager_c17(ranks: Ranks, backend: str, fault: str) -> None:
    for result, compiled, eager, equal in ranks(mixed, backend=backend):
        assert result.problem == ""
        assert result.loss_relative == 0
        assert compiled == ("blocks.0", "blocks.2")
        assert eager == ("blocks.1", "blocks.3")
        assert [(c.fault, c.regions) for c in result.given_up] == [(fault, eager)]
        assert equal


def regions_of_code() -> dict[str, Any]:
    model = Mixed()
    for block in model.blocks:
        block.compile(backend="eager")
    with guarded(on_compiling=nullcontext) as guard:
        guard.attach(model)
        regions = guard.regions
        code, linear = Odd.forward.__code__, nn.Linear.forward.__code__

        def place(of: Any) -> Any:
            from ctj_trainer.compile.causes import Place

            return Place(file=of.co_filename, line=of.co_firstlineno)

        found: dict[str, Any] = {
            "own": regions.owners([place(code)]),
            "shared": regions.owners([place(linear)]),
            "both": regions.owners([place(linear), place(code)]),
            "nowhere": regions.owners([None]),
            "users": regions.instances(place(code)),
        }
        with regions.only(["blocks.1"]):
            found["only"] = [block._compiled_call_impl is not None for block in model.blocks]
        found["after"] = [block._compiled_call_impl is not None for block in model.blocks]
        return found


def test_a_place_in_the_source_tells_whose_region_it_is(ranks: Ranks) -> None:
    found = ranks(regions_of_code)[0]
    assert found["own"] == found["both"] == ("blocks.1", "blocks.3")
    assert len(found["shared"]) == len(found["nowhere"]) == 4
    assert found["users"] == 2
    assert found["only"] == [False, True, False, False]
    assert found["after"] == [True] * 4


class Compares(nn.Module):
    """A size is compared with a number, so that no graph serves two lengths (C30)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * (1.0 if x.shape[0] in (3, 5, 6, 7, 9, 11, 13, 17) else 2.0)


def eight_lengths() -> tuple[int, int, list[str]]:
    """Sixty steps of eight lengths in random order: graphs, recompilations, storms."""
    torch._dynamo.reset()
    layers, rule, storms = nn.ModuleList(Compares() for _ in range(4)), StormRule(), []
    chance = random.Random(0)
    with guarded(on_compiling=nullcontext) as guard:
        for layer in layers:
            layer.compile(backend="eager")
        guard.attach(layers)
        for step in range(60):
            x = torch.ones(chance.choice((3, 5, 6, 7, 9, 11, 13, 17)), 4, requires_grad=True)
            for layer in layers:
                x = layer(x)
            facts = guard.watch.read()
            storm = rule.judge(step, guard.watch.take(), is_warming=step < 2, instances=guard.regions.instances)
            storms += [str(storm)] if storm else []
        return facts.graphs, facts.recompiles, storms


def test_eight_lengths_in_random_order_make_eight_graphs_at_most_and_no_alarm_c30(ranks: Ranks) -> None:
    graphs, recompiles, storms = ranks(eight_lengths)[0]
    assert storms == []
    assert 2 <= graphs <= 8
    assert recompiles == graphs - 1


class Attends(nn.Module):
    """Stand-in for attention over packed samples: needs the longest length as a number (C28)."""

    def __init__(self, *, given: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.given = given

    def forward(self, x: Tensor, lengths: Tensor, longest: int) -> Tensor:
        most = longest if self.given else int(lengths.diff().max().item())
        return x + torch.tanh(self.linear(x)) * most


def packed(given: bool) -> tuple[int, int, list[str]]:
    """Ten steps with other lengths in each: graphs, breaks, what is said."""
    torch._dynamo.reset()
    layers = nn.ModuleList(Attends(given=given) for _ in range(4))
    with guarded(on_compiling=nullcontext) as guard:
        for layer in layers:
            layer.compile(backend="eager")
        guard.attach(layers)
        for step in range(10):
            x, lengths = torch.ones(2, 4, requires_grad=True), torch.tensor([0, 3 + step, 20 + 3 * step])
            longest = int(lengths.diff().max())
            for layer in layers:
                x = layer(x, lengths, longest)
        facts, notices = guard.watch.read(), Notices()
        notices.about_breaks(guard.breaks, guard.regions)
        return facts.graphs, facts.graph_breaks, notices.take()


def test_a_number_read_from_a_tensor_in_every_layer_is_named_with_line_and_op_c28(ranks: Ranks) -> None:
    _, breaks, said = ranks(packed, given=False)[0]
    assert breaks >= 1
    assert len(said) == 1
    assert said[0].startswith("graph break, 4 in each micro batch: Tensor.item() on a value that is known only at run")
    assert "test_compile_faults.py:" in said[0]
    assert "compute the number once in the collator" in said[0]
    graphs, breaks, said = ranks(packed, given=True)[0]
    assert (breaks, said) == (0, [])
    assert graphs <= 2


def after_a_failure() -> tuple[str, int]:
    """A region failed under the guard; somebody else compiles the same class afterwards (C27)."""
    torch._dynamo.reset()
    model = nn.Sequential(Even())
    model[0].compile(backend=raises(RuntimeError("no compiler")))
    with guarded(on_compiling=nullcontext) as guard:
        guard.attach(model)
        model(ONES)
        guard.watch.read()
        complaint = about_failures(guard.watch.take(), guard.regions)
        assert complaint is not None
        guard.give_up(complaint.regions)
        model(ONES)
    other = Even()
    other.compile(backend="eager")
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    other(ONES)
    return complaint.reason, torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs


def test_a_failure_leaves_no_mark_on_the_class_once_the_guard_is_left_c27(ranks: Ranks) -> None:
    for reason, graphs in ranks(after_a_failure):
        assert reason.startswith("backend_failed: BackendCompilerFailed: backend='backend' raised: RuntimeError: no ")
        assert graphs == 1
