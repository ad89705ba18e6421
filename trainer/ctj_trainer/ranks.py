"""Who am I among the processes, and how do we agree? Two groups: one for gradients, one (gloo) for control.

Control has its own group so that a vote never meets a gradient bucket of a rank that is one call behind.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ctj_trainer.compile.board import CompileBoard


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process's place; all methods are collective."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    control: Any  # the gloo group
    board: CompileBoard

    def add_up(self, values: Sequence[float | Tensor]) -> list[float]:
        """Sum each number over the ranks, in double precision."""
        parts = [torch.as_tensor(value, dtype=torch.float64, device=self.device) for value in values]
        total = torch.stack(parts)
        if self.world_size > 1:  # alone, a collective would only wake a thread
            dist.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def vote(self, ballot: Sequence[int]) -> list[int]:
        """Return the largest of each number over the ranks."""
        if self.world_size == 1:
            return [int(value) for value in ballot]
        box = torch.tensor(list(ballot), dtype=torch.int64)
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self.control)
        return [int(value) for value in box.tolist()]

    def share(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values


@contextmanager
def joined(*, timeout_seconds: float) -> Iterator[Ranks]:
    """Join the other processes as torchrun's environment says; alone where there is none.

    The timeout is that of the longest legitimate wait: a peer that meets a new shape and compiles. A hung peer is the
    supervisor's to find. An error that passes through gets a note if somebody still compiles.
    """
    device = _device()
    timeout = timedelta(seconds=timeout_seconds)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store, rank, world_size = _met(timeout)
    apart = dist.PrefixStore("data", store)  # type: ignore[attr-defined]  # re-exported
    dist.init_process_group(backend, timeout=timeout, store=apart, rank=rank, world_size=world_size)
    board = CompileBoard(store, rank=rank, world_size=world_size)
    ranks = Ranks(
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=world_size,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        device=device,
        control=dist.new_group(backend="gloo", timeout=timeout),
        board=board,
    )
    try:
        yield ranks
    except Exception as error:
        if note := board.who():
            error.add_note(note)
        raise
    dist.destroy_process_group()  # not after an error: it would wait for peers that wait for us


def _met(timeout: timedelta) -> tuple[Any, int, int]:
    """Return the store in which all processes are, this one's rank, and their number."""
    if "RANK" not in os.environ:
        return dist.HashStore(), 0, 1  # type: ignore[attr-defined]  # re-exported
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]  # re-exported
    store.set_timeout(timeout)
    return store, rank, world_size


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
