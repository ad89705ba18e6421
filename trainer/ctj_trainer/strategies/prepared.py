"""What every strategy gives the loop: one object with the same five verbs. All of them are collective."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn


class Prepared(Protocol):
    """A model and its optimizer, laid out over the ranks by one strategy."""

    model: nn.Module
    """Call this for a forward."""
    inner: nn.Module
    """The recipe's module itself; its parameter names are the checkpoint's names."""

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Enter for each micro batch; gradients are synchronised only in the last one where the strategy can wait."""

    def backward(self, loss: Tensor) -> None:
        """Backward of one micro batch. Gradients add up to the sum over all ranks and micro batches of `loss`
        (the loop divides by the global token count before calling this; no strategy averages behind its back)."""

    def step(self, *, learning_rate: float, clip: float) -> float:
        """Clip (0: do not), update, zero the gradients; return the global gradient norm before clipping."""

    def discard_gradients(self) -> float:
        """Return the global gradient norm and zero the gradients without an update (for probes)."""

    def state(self) -> dict[str, Any]:
        """Return model and optimizer state under clean names, as torch.distributed.checkpoint wants it."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state()` of any other strategy described."""

    def full_weights(self) -> dict[str, Tensor]:
        """Return all weights on the CPU of rank 0 (empty elsewhere), for the final export."""
