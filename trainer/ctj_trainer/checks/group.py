"""A process group of this process alone, so that wrappers can be tried without a launcher."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore


@contextmanager
def alone() -> Iterator[None]:
    """Be a world of one, unless this process has joined one already."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
