"""Models with every kind of hook that must stay out of graphs, built as the libraries that place them do."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, CpuOffload, LayerwiseCastingHook, ModelHook, add_hook_to_module
from torch import Tensor, nn

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Stack(nn.Module):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Moving(ModelHook):
    """A hook of somebody's own: Accelerate does not exclude it."""

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        device = next(module.parameters()).device
        return tuple(a.to(device, non_blocking=True) for a in args), kwargs


def offloaded_by_accelerate(module: nn.Module) -> None:
    add_hook_to_module(module, CpuOffload(execution_device="cpu"))


def aligned_by_accelerate(module: nn.Module) -> None:
    add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))


def chained_by_accelerate(module: nn.Module) -> None:
    add_hook_to_module(module, CpuOffload(execution_device="cpu"))
    add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"), append=True)


def cast_by_accelerate(module: nn.Module) -> None:
    hook = LayerwiseCastingHook(storage_dtype=torch.bfloat16, compute_dtype=torch.float32, non_blocking=False)
    add_hook_to_module(module, hook)


def moved_by_own_hook(module: nn.Module) -> None:
    add_hook_to_module(module, Moving())


class GroupOffloadingHook:
    """Stands for diffusers': moves a group in before, and out after."""

    def __init__(self) -> None:
        self.fn_ref: Any = None

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        module.to("cpu", non_blocking=True)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        module.to("cpu")
        return output


def offloaded_by_group(module: nn.Module) -> None:
    """As diffusers' HookRegistry: the rewritten forward reads its functions from a reference at each call."""
    hook = GroupOffloadingHook()
    reference = SimpleNamespace(
        pre_forward=hook.pre_forward, post_forward=hook.post_forward, forward=module.forward, original_forward=None
    )

    def new_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = reference.pre_forward(module, *args, **kwargs)
        return reference.post_forward(module, reference.forward(*args, **kwargs))

    module._diffusers_hook = SimpleNamespace(hooks={"group_offloading": hook}, _fn_refs=[reference])  # type: ignore[assignment]
    module.forward = functools.update_wrapper(functools.partial(new_forward, module), new_forward)


def replaced_by_disabled(module: nn.Module) -> None:
    """A forward swapped for a function marked "do not compile" (huggingface/diffusers#11584)."""
    original = module.forward

    @torch.compiler.disable
    def streamed(*args: Any, **kwargs: Any) -> Any:
        module.to("cpu")
        return original(*args, **kwargs)

    module.forward = streamed


def move_weights(module: nn.Module, _: Any) -> None:
    module.to("cpu")


def draw_anew(module: nn.Module, _: Any) -> None:
    _seed(7)


def _seed(number: int) -> None:
    torch.manual_seed(number)


def moved_by_torch_hook(module: nn.Module) -> None:
    module.register_forward_pre_hook(move_weights)


def seeded_by_torch_hook(module: nn.Module) -> None:
    module.register_forward_pre_hook(draw_anew)


EVERY_KIND: dict[str, Callable[[nn.Module], None]] = {
    "CpuOffload": offloaded_by_accelerate,
    "AlignDevicesHook": aligned_by_accelerate,
    "SequentialHook": chained_by_accelerate,
    "LayerwiseCastingHook": cast_by_accelerate,
    "Moving": moved_by_own_hook,
    "GroupOffloadingHook": offloaded_by_group,
    "streamed": replaced_by_disabled,
    "move_weights": moved_by_torch_hook,
    "draw_anew": seeded_by_torch_hook,
}
