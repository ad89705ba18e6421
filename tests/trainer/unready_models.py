"""Models that break one rule of a static graph each, and models that break none. `# <-` marks the line to be named."""
# ruff: noqa: SIM108

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)


# -- branches


class BranchesOnSum(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # <-
            y = self.linear(x)
        else:
            y = x * 2
        return y


class BranchesOnRouting(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.linear(x)).mean()
        return x if gate > 0.5 else -x  # <-


class LoopsUntilSmall(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        while x.norm() > 1:  # <-
            x = x / 2
        return self.linear(x)


class BranchesOnWeights(_Layer):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.scale > 0:  # <-
            return self.linear(x)
        return x


# -- loops


class LoopsOverRows(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for row in x:  # <-
            rows.append(self.linear(row))
        return torch.stack(rows)


class LoopsByIndex(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(8)
        for i in range(x.shape[0]):  # <-
            total = total + self.linear(x[i])
        return total


class LoopsByContents(_Layer):
    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        for _ in range(steps.item()):  # <-
            x = self.linear(x)
        return x


# -- data-dependent shapes


class SelectsByMask(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        keep = x > 0
        return self.linear(x).sum() + x[keep].sum()  # <-


class ListsNonzero(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        rows, _ = torch.nonzero(x, as_tuple=True)  # <-
        return self.linear(x)[rows]


class WhereWithOneArgument(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        indices = torch.where(x > 0)  # <-
        return self.linear(x).sum() + indices[0].sum()


# -- assertions


class AssertsContents(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        assert (x > -1e6).all(), "too small"  # <-
        return self.linear(x)


class RaisesOnNan(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        if torch.isnan(x).any():  # <-
            raise ValueError("not a number")
        return self.linear(x)


class AssertsInHelper(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(_checked(x))


def _checked(x: Tensor) -> Tensor:
    assert x.abs().max() < 1e6  # <-
    return x


# -- numbers read from tensors (C28)


class LongestOfPacked(_Layer):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        longest = lengths.max().item()  # <-
        return self.linear(x) * longest


class ConvertsToInt(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        scale = float(x.detach().abs().max())  # <-
        return self.linear(x) / scale


class ListsLengths(_Layer):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return torch.cat([part.mean(0, keepdim=True) for part in x.split(lengths.tolist())])  # <-


# -- topology


class RegistersBuffer(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.register_buffer("mask", torch.ones_like(x))  # <-
        return self.linear(x)


class MakesParameter(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.bias = nn.Parameter(torch.zeros(8))  # <-
        return self.linear(x) + self.bias


class AddsModule(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.add_module("extra", nn.Linear(8, 8))  # <-
        return self.linear(x)


class CountsCalls(_Layer):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1  # <-
        return self.linear(x) * self.step


class KeepsLast(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x  # <-
        return self.linear(x)


class CachesInHelper(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self._cached(x)

    def _cached(self, x: Tensor) -> Tensor:
        self.cache = x.detach()  # <-
        return self.cache


# -- autocast and constants


class NestsAutocast(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(x)
            with torch.autocast("cpu", dtype=torch.float16):  # <-
                return self.linear(y)


class SwitchesOff(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):  # <-
            return x.float() @ self.linear.weight


class NestsUnderDecorator(_Layer):
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):  # <-
            return self.linear(x)


class EntersByHand(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        context = torch.autocast("cpu", dtype=torch.bfloat16)
        context.__enter__()  # <-
        y = self.linear(x)
        context.__exit__(None, None, None)
        return y


class SetsAutocast(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        torch.set_autocast_enabled("cpu", True)  # <-
        return self.linear(x)


class EntersOnStack(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        import contextlib

        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))  # <-
            return self.linear(x)


class FixesHalfConstant(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.tensor(0.5, dtype=torch.float16)  # <-


class CallsHalf(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).half().float()  # <-


class MasksBeyondHalf(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.linear(x).masked_fill(x < 0, -1e9), -1)  # <-


# -- nothing wrong


class Ready(_Layer):
    """Branches on shapes, configuration and None; loops over layers; fills a buffer in place."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.depth = depth
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        assert x.shape[-1] == 8, "width"
        if mask is not None:
            x = torch.where(mask, x, 0)
        if self.training and x.dim() > 1:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        for _ in range(self.depth):
            x = x * 2
        return self.linear(x) * scale if scale != 1.0 else self.linear(x)


class ReadyAttention(_Layer):
    """Casts with the dtype it meets, masks with the limit of that dtype, asserts in the graph."""

    def forward(self, x: Tensor) -> Tensor:
        batch, width = x.shape
        scores = self.linear(x) / width**0.5
        torch._assert(batch > 0, "empty")
        causal = torch.ones(batch, width, dtype=torch.bool, device=x.device).tril()
        scores = scores.masked_fill(~causal, torch.finfo(scores.dtype).min)
        return F.softmax(scores.float(), dim=-1).to(x.dtype) * x


READY: tuple[type[Any], ...] = (Ready, ReadyAttention)
