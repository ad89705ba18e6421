"""Hooks that move, cast or draw stay out of graphs, and the computation between them stays compiled."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from accelerate import cpu_offload
from accelerate.hooks import CpuOffload, add_hook_to_module
from tests.trainer import foreign_checkpoint
from tests.trainer.foreign_checkpoint import checkpoint as imported_by_name
from tests.trainer.hooked_models import EVERY_KIND, WIDTH, Block, Moving, Stack, move_weights, replaced_by_disabled
from torch import Tensor, nn
from torch._dynamo.utils import counters

from ctj_trainer.hooks import HookAuditError, OffloadHooks, assert_all_disabled, is_excluded, no_compile
from ctj_trainer.hooks.excluded import no_compile as excluded_no_compile
from ctj_trainer.hooks.found import entry_points
from ctj_trainer.hooks.frozen import FrozenHooks
from ctj_trainer.hooks.graphs import GraphLog, impurities
from ctj_trainer.hooks.pure import compile_around_hooks

# The compiler itself looks at the gradient of a region's input.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def breaks() -> int:
    return sum(counters["graph_break"].values()) + sum(counters["unimplemented"].values())


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)


@pytest.fixture(autouse=True)
def original_checkpoint() -> Iterator[None]:
    """Exclusion changes functions of the whole process."""
    original = foreign_checkpoint.checkpoint
    yield
    foreign_checkpoint.checkpoint = original
    globals()["imported_by_name"] = original


# -- no_compile


def test_an_excluded_function_keeps_its_name_and_can_be_told() -> None:
    @no_compile(reason="moves weights")
    def onload(x: Tensor) -> Tensor:
        """Bring it in."""
        return x + 1

    assert onload.__name__ == "onload"
    assert onload.__doc__ == "Bring it in."
    assert is_excluded(onload)
    assert not is_excluded(breaks)
    assert no_compile(onload) is onload
    assert excluded_no_compile is no_compile


def test_an_excluded_module_keeps_class_and_parameter_names() -> None:
    block = Block()
    names = list(block.state_dict())
    assert no_compile(block) is block
    assert list(block.state_dict()) == names
    log = GraphLog()
    torch.compile(Stack.forward, backend=log)(Stack(1).requires_grad_(False), inputs())
    assert len(log.graphs) == 1
    assert is_excluded(block.forward)


# -- the audit


def hooked_everywhere() -> nn.Module:
    model = Stack(len(EVERY_KIND))
    for block, place in zip(model.blocks, EVERY_KIND.values(), strict=True):
        place(block)
    return model


def test_the_audit_names_each_hook_that_would_be_traced() -> None:
    model = hooked_everywhere()
    with pytest.raises(HookAuditError) as error:
        assert_all_disabled(model)
    message = str(error.value)
    for kind in ("Moving.pre_forward", "GroupOffloadingHook.pre_forward", "move_weights", "draw_anew"):
        assert kind in message
    assert "sets or forks a random generator" in message  # found in a helper of the hook
    assert "no_compile" in message
    assert "CpuOffload" not in message  # Accelerate excludes its own, before their first call too


def test_the_audit_is_green_once_all_are_excluded_and_red_when_any_one_is_not() -> None:
    model = hooked_everywhere()
    told = OffloadHooks.of(model).exclude_all()
    assert_all_disabled(model)
    assert all(line.endswith("kept eager") for line in told)
    entries = entry_points(model)
    assert {entry.kind.split(".")[-1] for entry in entries} >= {"CpuOffload", "SequentialHook", "streamed", "Moving"}
    for entry in entries:
        if entry.point == "forward":
            continue  # its exclusion is what makes it a hook: without it, it is a plain forward

        def traced(*arguments: Any) -> None:
            del arguments
            torch.manual_seed(1)

        traced.__qualname__ = "traced"
        entry.replace(traced)
        with pytest.raises(HookAuditError, match=entry.point):
            assert_all_disabled(model)
        entry.replace(entry.function)
        assert_all_disabled(model)


def test_hooks_without_side_effects_and_models_without_hooks_pass() -> None:
    model = Stack(2)
    model.blocks[0].register_forward_hook(lambda *call: call[-1] * 1.0)
    assert entry_points(model) == []
    OffloadHooks.of(model).exclude_all()
    assert_all_disabled(model)


def test_checkpoint_functions_of_other_libraries_are_excluded_under_every_name() -> None:
    """C22: recomputation inside a traced checkpoint function may draw another dropout mask."""
    importlib.reload(foreign_checkpoint)  # an earlier test of this process may have excluded it
    globals()["imported_by_name"] = foreign_checkpoint.checkpoint
    found = [entry.home for entry in OffloadHooks.of(Stack(1)).traced]
    assert "tests.trainer.foreign_checkpoint" in found
    told = OffloadHooks.of(Stack(1)).exclude_all()
    assert any("foreign_checkpoint.checkpoint" in line for line in told)
    assert_all_disabled(Stack(1))
    assert is_excluded(imported_by_name)


def test_dropout_masks_of_forward_and_recomputation_agree_in_compiled_steps() -> None:
    """C22."""
    masks: list[Tensor] = []

    class Dropping(Block):
        def forward(self, x: Tensor) -> Tensor:
            dropped = torch.nn.functional.dropout(torch.ones_like(x), 0.5)
            masks.append(dropped.detach())
            return dropped * torch.tanh(self.linear(x))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Dropping()

        def forward(self, x: Tensor) -> Tensor:
            return imported_by_name(self.block, x * 2).sum()

    model = Outer()
    OffloadHooks.of(model).exclude_all()
    model.compile(backend="aot_eager")
    for step in range(20):
        torch.manual_seed(step)
        model(inputs().requires_grad_()).backward()
    assert len(masks) == 40
    assert all(torch.equal(forward, again) for forward, again in zip(masks[::2], masks[1::2], strict=True))
    assert not torch.equal(masks[0], masks[2])


# -- hooks that come later


def test_a_hook_added_after_the_first_compiled_call_is_noticed() -> None:
    model = Stack(2)
    frozen = FrozenHooks.of(model, compiled_roots=frozenset({"blocks.0"}))
    assert frozen.changes(model) == []
    model.blocks[1].linear.register_forward_pre_hook(move_weights)
    model.blocks[0].register_forward_pre_hook(move_weights)
    root, inner = frozen.changes(model)
    assert root.startswith("hooks of blocks.0 changed after the first compiled call")
    assert "never fires" not in root
    assert inner.startswith("hooks of blocks.1.linear changed")
    assert "never fires" in inner


def test_the_warning_is_true() -> None:
    """A hook on a submodule of a compiled block, added after the first call, is not called."""
    block, calls = Block(), []
    block.compile(backend="eager")
    block(inputs())
    frozen = FrozenHooks.of(block, compiled_roots=frozenset({""}))
    block.linear.register_forward_pre_hook(lambda *_: calls.append(1))
    block(inputs())
    assert calls == []
    assert "never fires" in frozen.changes(block)[0]


def test_a_hook_that_was_replaced_or_attached_by_accelerate_is_noticed() -> None:
    model = Stack(2)
    frozen = FrozenHooks.of(model)
    add_hook_to_module(model.blocks[1], CpuOffload(execution_device="cpu"))
    assert [line.split()[2] for line in frozen.changes(model)] == ["blocks.1"]


# -- the computation stays compiled


def test_a_hooked_linear_compiles_as_one_full_graph() -> None:
    """C13: fullgraph raised from inside the offload hook."""
    linear = nn.Linear(WIDTH, WIDTH)
    expected = linear(inputs())
    add_hook_to_module(linear, CpuOffload(execution_device="cpu"))
    log = GraphLog()
    form = compile_around_hooks(linear, lambda: {"backend": log, "fullgraph": True}, name="linear")
    assert torch.equal(linear(inputs()), expected)
    assert len(log.graphs) == 1
    assert log.problems() == []
    assert form.notice == "linear: offload hook: kept eager (CpuOffload); its computation is compiled"


def test_cpu_offload_of_a_whole_model_breaks_no_graph() -> None:
    """C13: 6 hidden breaks in a model of 3 layers; here 12 calls."""
    model = Stack(3).requires_grad_(False)
    expected = model(inputs())
    cpu_offload(model, execution_device=torch.device("cpu"))
    OffloadHooks.of(model).exclude_all()
    log = GraphLog()
    form = compile_around_hooks(model, lambda: {"backend": log}, name="model")
    for _ in range(12):
        assert torch.equal(model(inputs()), expected)
    assert breaks() == 0
    assert len(log.graphs) == 1  # three equal layers share it
    assert form.compiled == ("model.blocks.0.linear", "model.blocks.1.linear", "model.blocks.2.linear")
    assert log.problems() == []


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_block_with_any_kind_of_hook_keeps_its_computation_compiled(kind: str) -> None:
    """C13, C15: outputs and gradients equal eager; graphs >= 1; no break inside regions."""
    torch.manual_seed(0)
    plain, hooked = Stack(2), Stack(2)
    hooked.load_state_dict(plain.state_dict())
    for model in (plain, hooked):
        for block in model.blocks:
            EVERY_KIND[kind](block)
    OffloadHooks.of(hooked).exclude_all()
    assert_all_disabled(hooked)
    log = GraphLog()
    forms = [compile_around_hooks(block, lambda: {"backend": log}, name="block") for block in hooked.blocks]
    for _ in range(3):
        expected, output = plain(inputs().requires_grad_()), hooked(inputs().requires_grad_())
        assert torch.equal(output, expected)
    output.sum().backward()
    expected.sum().backward()
    for one, other in zip(plain.parameters(), hooked.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)
    assert len(log.graphs) == 1 if kind != "streamed" else len(log.graphs) >= 1
    assert breaks() == 0
    assert log.problems() == []
    assert all("kept eager" in form.notice for form in forms)
    assert list(hooked.state_dict()) == list(plain.state_dict())


def test_the_usual_way_compiles_a_replaced_forward_to_nothing() -> None:
    """C15 as users met it: why the region is not simply compiled."""
    block = Block()
    replaced_by_disabled(block)
    log = GraphLog()
    block.compile(backend=log)
    block(inputs())
    assert log.graphs == []


def test_a_forward_that_a_hook_hides_is_reported_as_not_compiled() -> None:
    """C15: never silent."""
    block = Block()
    hidden = {"forward": block.forward}

    @no_compile
    def hiding(x: Tensor) -> Tensor:
        return hidden["forward"](x)

    block.forward = hiding
    form = compile_around_hooks(block, lambda: {"backend": "eager"}, name="blocks.0")
    assert form.compiled == ()
    assert form.notice == "blocks.0: not compiled: the forward of blocks.0 was replaced by a hook"


def test_weights_that_offload_replaces_are_read_anew_by_the_graph() -> None:
    """A graph must not keep the tensor that the last onload made: it is freed."""
    block = Block().requires_grad_(False)
    cpu_offload(block, execution_device=torch.device("cpu"))
    log = GraphLog()
    compile_around_hooks(block, lambda: {"backend": log})
    first = block(inputs())
    weights = block.linear._hf_hook.weights_map
    assert block.linear.weight.is_meta
    weights["weight"].mul_(2)
    second = block(inputs())
    assert not torch.equal(first, second)
    assert len(log.graphs) == 1


# -- what a graph may hold


def captured(function: Any, *arguments: Tensor) -> GraphLog:
    log = GraphLog()
    torch.compile(function, backend=log)(*arguments)
    return log


def test_device_moves_in_a_graph_are_named_with_their_line() -> None:
    problems = captured(lambda x: (x + 1).to("meta") * 2, inputs()).problems()
    assert len(problems) == 1
    assert "from cpu to meta" in problems[0]
    assert "test_hooks.py" in problems[0]


def test_casts_and_plain_computation_are_no_moves() -> None:
    assert captured(lambda x: (x.to(torch.bfloat16) @ x.T.to(torch.bfloat16)).float(), inputs()).problems() == []


def test_freed_tensors_in_a_graph_are_named() -> None:
    log = captured(lambda x: x + 1, inputs())
    gone = torch.ones(4)
    gone.untyped_storage().resize_(0)
    assert impurities(log.graphs[0], [gone]) == ["input 0 refers to freed memory: its storage is empty"]
    assert "meta" in impurities(log.graphs[0], [torch.ones(4, device="meta")])[0]


def test_an_own_hook_class_is_traced_unless_excluded() -> None:
    model = Stack(1)
    add_hook_to_module(model.blocks[0], Moving())
    assert [entry.point for entry in entry_points(model) if not entry.is_excluded] == ["pre_forward"]


def test_a_warm_restart_with_offload_reads_no_freed_tensor(tmp_path: Path) -> None:
    """The second process takes its code from the cache: made when weights lay elsewhere, freed since."""
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(str(Path(part or ".").absolute()) for part in [".", *sys.path]),
    }
    program = [sys.executable, str(Path(__file__).parent / "offloaded_start.py")]
    seen = []
    for _ in range(2):
        done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        seen.append(json.loads(done.stdout.splitlines()[-1]))
    for start in seen:
        assert start | {"hits": 0} == {"equal": True, "read_anew": True, "offloaded": True, "graphs": 1, "hits": 0}
    assert seen[0]["hits"] == 0
    assert seen[1]["hits"] >= 1
