"""A checkpoint function as another library writes it: the recomputation restores generator states by itself."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class CheckpointFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], x: Tensor) -> Tensor:
        ctx.run, ctx.state = run, torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (saved,) = ctx.saved_tensors
        x = saved.detach().requires_grad_()
        before = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            y = ctx.run(x)
        torch.set_rng_state(before)
        y.backward(gradient)
        return None, x.grad


def checkpoint(run: Callable[..., Tensor], x: Tensor) -> Tensor:
    return CheckpointFunction.apply(run, x)
