"""How large is the factor on an fp16 loss, so that gradients neither vanish nor overflow? Pure, no torch.

One rule for every strategy. The gradient norm is the same number on all ranks, so all of them skip the same steps
without a vote of their own; and the factor that a backward really meets does not depend on the number of processes, so
that all strategies overflow in the same steps.
"""

import math
from typing import Annotated

from pydantic import Field

from ctj_api.model import Contract
from ctj_api.spec import Precision, Training

INITIAL = 2.0**16  # start, growth, patience and halving as torch.amp.GradScaler has them
GROWTH_STEPS = 2000
FLOOR = 1.0


class LossScaleState(Contract):
    """What a checkpoint keeps of it."""

    scale: Annotated[float, Field(gt=0)]
    good_steps: Annotated[int, Field(ge=0, description="Updates without an overflow since the scale last changed.")]


class LossScale:
    """The dynamic scale of one training; halved where gradients overflow, doubled after many good steps."""

    def __init__(self, *, averaged_over: int) -> None:
        self.state = LossScaleState(scale=INITIAL, good_steps=0)
        self.skipped = False
        """Whether the last update was left out because of an overflow that a smaller scale may cure."""
        self._averaged_over = averaged_over

    @classmethod
    def of(cls, training: Training, *, averaged_over: int = 1) -> "LossScale | None":
        """Return what fp16 needs, None for other precisions. `averaged_over`: processes that the strategy divides by,
        after a backward whose loss it multiplied by as many."""
        return cls(averaged_over=averaged_over) if training.precision is Precision.FP16 else None

    @property
    def factor(self) -> float:
        """Gradients are this many times too large."""
        return self.state.scale / self._averaged_over

    def learn(self, norm: float) -> None:
        """Take note of one update's gradient norm, which decides whether it was an update."""
        scale, good_steps = self.state.scale, self.state.good_steps + 1
        if not math.isfinite(norm):
            self.skipped = scale > FLOOR
            self.state = LossScaleState(scale=max(scale / 2, FLOOR), good_steps=0)
            return
        self.skipped = False
        grown = good_steps == GROWTH_STEPS
        self.state = LossScaleState(scale=scale * 2 if grown else scale, good_steps=0 if grown else good_steps)
