"""What safe compiling with Accelerate promises, each promise against the real thing: real Accelerator, real graphs."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.config as dynamo
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from safetensors.torch import load_file
from tests.trainer.conftest import Ranks
from tests.trainer.small import EVERY_STRATEGY, trained
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from ctj_api.spec import Strategy
from ctj_trainer.accelerate import (
    CompilePolicy,
    compile_guard,
    compiled_regions,
    is_compiled,
    resolve_policy,
    safe_compile_with_accelerate,
)

# torch asks every input of a graph for its gradient, and warns that an activation has none.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
WIDTH = 16
LENGTHS = tuple(range(5, 29))
assert len(LENGTHS) == 24


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 32)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model(width: int = WIDTH) -> Model:
    torch.manual_seed(0)
    return Model(width)


def tokens(length: int = 6, batch: int = 2) -> Tensor:
    return torch.arange(batch * length).view(batch, length) % 32


def accelerator(**fields: Any) -> Accelerator:
    AcceleratorState._reset_state()
    return Accelerator(cpu=True, **fields)


def losses_of(compiled: nn.Module, optimizer: Any, batches: list[Tensor]) -> list[float]:
    seen = []
    for batch in batches:
        loss = compiled(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(loss.detach()))
    return seen


def compiles(policy: CompilePolicy, lengths: tuple[int, ...] | list[int]) -> int:
    """Compilations of a prepared model over batches of these lengths; its results stay right."""
    torch._dynamo.reset()
    assert isinstance(policy.backend, CompileCounter)
    compiled = safe_compile_with_accelerate(accelerator(), model(), policy)
    for length in lengths:
        assert torch.allclose(compiled(tokens(length)), model()(tokens(length)), atol=1e-6)
    return int(policy.backend.frame_count)


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    AcceleratorState._reset_state()


def counting(**fields: Any) -> CompilePolicy:
    return CompilePolicy(backend=CompileCounter(), **fields)


def test_compiling_comes_after_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    here = accelerator()
    prepare = here.prepare

    def preparing(*parts: Any) -> Any:
        order.append(("prepare", is_compiled(parts[0])))
        return prepare(*parts)

    monkeypatch.setattr(here, "prepare", preparing)
    optimizer = torch.optim.SGD(model().parameters())

    compiled, _ = safe_compile_with_accelerate(here, model(), counting(), optimizer)
    again = safe_compile_with_accelerate(here, compiled, counting())

    assert order == [("prepare", False)]
    assert again is compiled
    assert compiled_regions(compiled) == ["blocks.0", "blocks.1", "blocks.2"]


def test_dynamic_compiles_fewer_than_static() -> None:
    few = list(LENGTHS[:6])

    static = compiles(counting(dynamic="Static"), few)

    assert static == 6
    assert compiles(counting(dynamic="Dynamic"), few) == 1
    assert compiles(counting(), few) == 2
    for scope in ("regional", "full"):
        assert compiles(counting(dynamic_dims={"input_ids": (1,)}, scope=scope), few) == 1


def under_ddp() -> dict[str, Any]:
    asked: list[bool] = []
    original = torch.compile

    def spying(*parts: Any, **keywords: Any) -> Any:
        asked.append(keywords["fullgraph"])
        return original(*parts, **keywords)

    torch.compile = spying  # type: ignore[assignment]
    seen: dict[str, Any] = {}
    try:
        for name in ("eager", "compiled"):
            torch._dynamo.reset()
            counters.clear()
            here = accelerator()
            # 4 MiB of parameters in buckets of 1: DDP's graph splitter has something to split.
            wide = DistributedDataParallel(model(512), bucket_cap_mb=1)
            if name == "compiled":
                wide = CompilePolicy(backend="aot_eager", fullgraph=True).apply(wide)
            optimizer = torch.optim.SGD(wide.parameters(), lr=0.1)
            # A short last batch after lengths that change (C07).
            batches = [*(tokens(length, 16) for length in range(16, 40, 2)), tokens(16, 7)]
            seen[name] = losses_of(wide, optimizer, batches)
            seen[name + " names"] = list(wide.state_dict())
        prepared = safe_compile_with_accelerate(here, model(), CompilePolicy(backend="aot_eager"))
        seen["type"] = type(prepared).__name__
        seen["regions"] = compiled_regions(prepared)
    finally:
        torch.compile = original
    return seen | {
        "fullgraph": asked,
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": dict(counters["graph_break"]),
    }


def test_fullgraph_is_off_under_ddp_and_lengths_do_not_storm(ranks: Ranks) -> None:
    """C07: DDP, blocks over several buckets, twelve lengths and a short last batch."""
    for seen in ranks(under_ddp):
        assert seen["fullgraph"]
        assert not any(seen["fullgraph"])
        assert seen["compiled"] == pytest.approx(seen["eager"], rel=1e-5)
        assert seen["compiled names"] == seen["eager names"]
        assert 1 <= seen["graphs"] <= 3  # fixed, symbolic, and the other batch size
        assert seen["breaks"] == {}
        assert (seen["type"], seen["regions"]) == ("DistributedDataParallel", ["blocks.0", "blocks.1", "blocks.2"])


def test_the_cap_is_honoured() -> None:
    assert compiles(counting(dynamic="Static", max_recompiles=3), LENGTHS[:8]) == 3


def test_a_fixed_shape_compiles_once() -> None:
    assert compiles(counting(), [9] * 5) == 1


def test_a_prepared_model_runs() -> None:
    results = []
    for policy in (CompilePolicy(scope="disabled"), CompilePolicy(backend="aot_eager")):  # type: ignore[arg-type]
        net = model()
        compiled, optimizer = safe_compile_with_accelerate(
            accelerator(), net, policy, torch.optim.SGD(net.parameters(), lr=0.1)
        )
        results.append(losses_of(compiled, optimizer, [tokens()] * 3))

    assert results[0] == results[1]
    assert results[0][0] > results[0][-1]
    assert counters["stats"]["unique_graphs"] == 1


def test_no_storm_on_varying_shapes() -> None:
    policy = counting()
    net = model()
    compiled, optimizer = safe_compile_with_accelerate(
        accelerator(), net, policy, torch.optim.SGD(net.parameters(), lr=0.1)
    )

    with compile_guard(policy, compiled, optimizer=optimizer) as guard:
        losses_of(compiled, optimizer, [tokens(length) for length in LENGTHS])
        assert guard is not None
        assert (guard.steps, guard.gave_up) == (24, [])

    assert isinstance(policy.backend, CompileCounter)
    assert policy.backend.frame_count == 2


def test_a_storm_ends_in_eager_with_right_gradients_and_switches_put_back() -> None:
    expected_model = model()
    expected = losses_of(
        expected_model, torch.optim.SGD(expected_model.parameters(), lr=0.1), [tokens(n) for n in LENGTHS]
    )
    policy = CompilePolicy(backend="eager", dynamic="Static", recompile_limit=4)  # type: ignore[arg-type]
    net = model()
    compiled, optimizer = safe_compile_with_accelerate(
        accelerator(), net, policy, torch.optim.SGD(net.parameters(), lr=0.1)
    )
    before = dynamo.suppress_errors

    with compile_guard(policy, compiled, optimizer=optimizer) as guard:
        seen = losses_of(compiled, optimizer, [tokens(length) for length in LENGTHS])

    assert guard is not None
    assert guard.gave_up
    assert seen == expected
    assert dynamo.suppress_errors == before


def test_a_plugin_is_taken_over_and_compiles_only_once() -> None:
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    here = accelerator(dynamo_plugin=plugin)

    compiled = safe_compile_with_accelerate(here, model())
    compiled(tokens())

    assert here.state.dynamo_plugin.backend == DynamoBackend.NO
    assert compiled_regions(compiled) == ["blocks.0", "blocks.1", "blocks.2"]
    assert counters["stats"]["unique_graphs"] == 1
    assert type(here.prepare(model())) is Model


def test_the_environment_switches_it_off_without_a_change_of_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")

    assert not resolve_policy(backend="eager").compiles
    assert not is_compiled(safe_compile_with_accelerate(accelerator(), model(), CompilePolicy(backend="eager")))
    assert not is_compiled(CompilePolicy(backend="eager").apply(model()))


def compiled_by_plugin(**fields: Any) -> tuple[Accelerator, nn.Module]:
    here = accelerator(dynamo_plugin=TorchDynamoPlugin(backend="aot_eager", **fields))
    return here, here.prepare(model())


def compiled_by_hand() -> tuple[Accelerator, nn.Module]:
    net = model()
    net.blocks[1] = torch.compile(net.blocks[1], backend="aot_eager")  # type: ignore[assignment]
    here = accelerator()
    return here, here.prepare(net)


THREE_WAYS = {
    "whole": compiled_by_plugin,
    "regional": lambda: compiled_by_plugin(use_regional_compilation=True),
    "by hand": compiled_by_hand,
}


@pytest.mark.parametrize("way", list(THREE_WAYS))
def test_saved_names_are_those_of_a_model_that_was_never_compiled(way: str, tmp_path: Path) -> None:
    """C31: compiled by the plugin as a whole, by region, or one block by the user before prepare."""
    here, prepared = THREE_WAYS[way]()
    compiled = safe_compile_with_accelerate(here, prepared, CompilePolicy(backend="aot_eager"))
    optimizer = here.prepare(torch.optim.SGD(compiled.parameters(), lr=0.1))
    losses_of(compiled, optimizer, [tokens()])
    graphs = counters["stats"]["unique_graphs"]

    here.save_state(str(tmp_path / "state"))
    here.save_model(compiled, str(tmp_path / "model"))

    clean = list(model().state_dict())
    for folder in ("state", "model"):
        saved = load_file(tmp_path / folder / "model.safetensors")
        assert sorted(saved) == sorted(clean)
        model().load_state_dict(saved, strict=True)
        compiled.load_state_dict(saved, strict=True)
    assert list(here.unwrap_model(compiled).state_dict()) == clean
    assert list(here.get_state_dict(compiled)) == clean
    losses_of(compiled, optimizer, [tokens()])
    assert counters["stats"]["unique_graphs"] == graphs >= 1
    assert not is_compiled(copy.deepcopy(compiled))


def applied_to(strategy: Strategy) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    with trained(strategy) as run:
        eager = run.run(range(1, 3))
    with trained(strategy) as run:
        names = list(dict(run.prepared.inner.named_parameters()))
        returned = CompilePolicy(backend="aot_eager").apply(run.prepared.model)
        compiled = run.run(range(1, 3))
        return {
            "same": returned is run.prepared.model,
            "names": list(dict(run.prepared.inner.named_parameters())) == names,
            "losses": (eager, compiled),
            "graphs": counters["stats"]["unique_graphs"],
            "regions": compiled_regions(run.prepared.inner),
        }


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_a_policy_applies_to_whatever_prepare_returned(ranks: Ranks, strategy: Strategy) -> None:
    for seen in ranks(applied_to, strategy=strategy):
        assert seen["same"]
        assert seen["names"]
        assert seen["losses"][1] == pytest.approx(seen["losses"][0], rel=1e-6)
        assert seen["graphs"] >= 1
        assert len(seen["regions"]) == 2
