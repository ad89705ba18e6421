"""How weights are updated: AdamW as every strategy builds it, and the learning rate as a pure function of the step."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from ctj_api.spec import Training

BETAS = (0.9, 0.95)
EPSILON = 1e-8


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Linear warm-up to the peak, then a cosine down to a share of it at the last step."""

    peak: float
    warmup_steps: int
    total_steps: int
    minimum_rate: float

    @classmethod
    def of(cls, training: Training) -> "Schedule":
        """Read the schedule of a job; the ladder does not matter, only the global step does."""
        return cls(
            peak=float(training.optimizer.learning_rate),
            warmup_steps=training.optimizer.warmup_steps,
            total_steps=training.steps,
            minimum_rate=float(training.optimizer.minimum_rate),
        )

    def learning_rate(self, step: int) -> float:
        """Rate of optimizer step `step`, counted from 1."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        falling = max(self.total_steps - self.warmup_steps, 1)
        progress = min((step - self.warmup_steps) / falling, 1.0)
        floor = self.peak * self.minimum_rate
        return floor + (self.peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def build_adamw(model: nn.Module, training: Training) -> AdamW:
    """AdamW over the trainable parameters as they are laid out now; matrices decay, vectors do not.

    One implementation (`fused`) for every strategy and device: for-each and fused differ in the last bit, and the
    choice must not change with the layout.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    # ZeRO-3 leaves an empty tensor behind; `ds_shape` is the parameter's own shape.
    matrices = [p for p in trainable if len(getattr(p, "ds_shape", p.shape)) >= 2]
    vectors = [p for p in trainable if len(getattr(p, "ds_shape", p.shape)) < 2]
    groups = [
        {"params": matrices, "weight_decay": float(training.optimizer.weight_decay)},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=float(training.optimizer.learning_rate),
        betas=BETAS,
        eps=EPSILON,
        fused=True,
    )


def create_state(optimizer: AdamW, parameters: Iterable[Tensor]) -> None:
    """Create AdamW's state now instead of at the first step.

    Memory is then known before training, and a checkpoint can be read in place into an optimizer that never stepped.
    """
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False),
        }


def set_learning_rate(optimizer: AdamW, learning_rate: float) -> None:
    """Set the rate of every group for the coming step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
