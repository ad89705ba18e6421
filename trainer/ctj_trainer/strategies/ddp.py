"""DistributedDataParallel: every process holds everything and gradients are summed."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ctj_api.spec import Training
from ctj_trainer.strategies.optimized import Optimized


class Ddp(Optimized):
    """Replicas; one all-reduce per step, in the last micro batch's backward."""

    def __init__(self, inner: nn.Module, training: Training, *, device: torch.device) -> None:
        replicated = DistributedDataParallel(
            inner, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True
        )
        super().__init__(replicated, inner, training, averaged_over=dist.get_world_size())
        self._replicated = replicated

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """Keep gradients local until the last micro batch."""
        with nullcontext() if last else self._replicated.no_sync():
            yield

    def backward(self, loss: Tensor) -> None:
        """DDP divides by the number of processes: multiply first."""
        super().backward(loss * dist.get_world_size())

    def full_weights(self) -> dict[str, Tensor]:
        """Rank 0's replica."""
        return super().full_weights() if dist.get_rank() == 0 else {}
