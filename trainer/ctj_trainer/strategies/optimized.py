"""What single, DDP and FSDP2 share: parameters are tensors (or DTensors) of ours, updated by an AdamW of ours."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ctj_api.spec import Training
from ctj_trainer.optimizer import build_adamw, create_state, set_learning_rate
from ctj_trainer.strategies.foundation import named_tensors
from ctj_trainer.strategies.prepared import ReadTensors


class Optimized:
    """A module whose parameters this process updates itself."""

    def __init__(self, model: nn.Module, inner: nn.Module, training: Training) -> None:
        self.model = model
        self.inner = inner
        self.optimizer = build_adamw(inner, training)
        self._trainable = {name: p for name, p in inner.named_parameters() if p.requires_grad}
        create_state(self.optimizer, self._trainable.values())
        self.num_elements = sum(tensor.numel() for tensor in named_tensors(inner).values())

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """Nothing to synchronise."""
        del last
        yield

    def backward(self, loss: Tensor) -> None:
        """Plain backward."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, *, learning_rate: float, clip: float) -> float:
        """Clip, update, zero."""
        norm = self._gradient_norm()
        value = float(norm)
        if math.isfinite(value):
            if clip > 0:
                clip_grads_with_norm_(list(self._trainable.values()), clip, norm)
            set_learning_rate(self.optimizer, learning_rate)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return value

    def discard_gradients(self) -> float:
        """Norm, then zero."""
        value = float(self._gradient_norm())
        self.optimizer.zero_grad(set_to_none=True)
        return value

    def state(self) -> dict[str, Tensor]:
        """The live tensors: a checkpoint is read in place."""
        state = {f"model.{name}": tensor.detach() for name, tensor in named_tensors(self.inner).items()}
        for name, parameter in self._trainable.items():
            state.update({f"optimizer.{name}.{key}": value for key, value in self.optimizer.state[parameter].items()})
        return state

    def load_state(self, read: ReadTensors) -> None:
        """Read into the live tensors."""
        read(self.state())

    @torch.no_grad()
    def full_weights(self) -> dict[str, Tensor]:
        """Copy to the CPU."""
        return {name: tensor.detach().cpu() for name, tensor in named_tensors(self.inner).items()}

    def close(self) -> None:
        """Drop gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def _gradient_norm(self) -> Tensor:
        gradients = [p.grad for p in self._trainable.values() if p.grad is not None]
        norm = get_total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
