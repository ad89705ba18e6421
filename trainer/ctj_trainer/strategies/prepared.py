"""What every strategy gives the loop: one object with the same verbs. All of them are collective."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn

from ctj_trainer.loss_scale import LossScale

ReadTensors = Callable[[dict[str, Tensor]], None]
"""Fill the given tensors in place from a checkpoint, by name."""


class Prepared(Protocol):
    """A model and its optimizer, laid out over the ranks by one strategy."""

    model: nn.Module
    """Call this for a forward."""
    inner: nn.Module
    """The recipe's module itself; its parameter names are the checkpoint's names."""
    computes_alone: bool
    """Whether forward and backward of a micro batch need no other rank, unless it is the last one."""
    num_elements: int
    """Elements of all weights, over all ranks; what a complete checkpoint must hold."""
    loss_scale: LossScale | None
    """Of fp16; applied in `backward`, taken off again before anybody sees a gradient or its norm."""

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Enter for forward and backward of each micro batch; gradients are synchronised only in the last one where
        the strategy can wait."""

    def backward(self, loss: Tensor) -> None:
        """Backward of one micro batch. Gradients add up to the sum over all ranks and micro batches of `loss`
        (the loop divides by the global token count before calling this; no strategy averages behind its back)."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Enter for forwards that nothing follows: no gradient, dropout off; afterwards everything is as before."""

    def step(self, *, learning_rate: float, clip: float) -> float:
        """Clip (0: do not), update, zero the gradients; return the global gradient norm before clipping.

        A norm that is not finite leaves weights and optimizer as they were; `loss_scale` learns from it."""

    def discard_gradients(self) -> float:
        """Return the global gradient norm and zero the gradients without an update (for probes)."""

    def state(self) -> dict[str, Tensor]:
        """Return weights and optimizer state under clean names; each rank its part, as
        torch.distributed.checkpoint wants it."""

    def load_state(self, read: ReadTensors) -> None:
        """Restore what `state()` of any strategy described; `read` fills tensors from it."""

    def full_weights(self) -> dict[str, Tensor]:
        """Return all weights on the CPU of rank 0 (empty elsewhere), for the final export."""

    def close(self) -> None:
        """Release hooks and buffers; the object is not used again."""
