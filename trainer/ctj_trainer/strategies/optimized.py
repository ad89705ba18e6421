"""What single, DDP and FSDP2 share: parameters are tensors (or DTensors) of ours, updated by an AdamW of ours."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ctj_api.spec import Training
from ctj_trainer.loss_scale import LossScale
from ctj_trainer.optimizer import build_adamw, create_state, set_learning_rate
from ctj_trainer.strategies.foundation import forward_only, named_tensors
from ctj_trainer.strategies.prepared import ReadTensors


class Optimized:
    """A module whose parameters this process updates itself."""

    computes_alone = True

    def __init__(self, model: nn.Module, inner: nn.Module, training: Training, *, averaged_over: int = 1) -> None:
        self.model = model
        self.inner = inner
        self.optimizer = build_adamw(inner, training)
        self.loss_scale = LossScale.of(training, averaged_over=averaged_over)
        self._trainable = {name: p for name, p in inner.named_parameters() if p.requires_grad}
        create_state(self.optimizer, self._trainable.values())
        self.num_elements = sum(tensor.numel() for tensor in named_tensors(inner).values())

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """Nothing to synchronise."""
        del last
        yield

    def backward(self, loss: Tensor) -> None:
        """Plain backward, of the scaled loss under fp16."""
        if self.loss_scale is not None:
            loss = loss.float() * self.loss_scale.factor  # an fp16 loss itself would overflow
        loss.backward()  # type: ignore[no-untyped-call]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Forward only."""
        with forward_only(self.inner):
            yield

    def step(self, *, learning_rate: float, clip: float) -> float:
        """Clip, update, zero."""
        norm = self._gradient_norm()
        value = float(norm)
        if math.isfinite(value):
            if self.loss_scale is not None:
                torch._foreach_mul_(self._gradients(), 1.0 / self.loss_scale.factor)
            if clip > 0:
                clip_grads_with_norm_(list(self._trainable.values()), clip, norm)
            set_learning_rate(self.optimizer, learning_rate)
            self.optimizer.step()
        if self.loss_scale is not None:
            self.loss_scale.learn(value)
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
        norm = get_total_norm(self._gradients())
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return norm if self.loss_scale is None else norm / self.loss_scale.factor

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._trainable.values() if p.grad is not None]
