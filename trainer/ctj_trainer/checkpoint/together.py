"""How ranks do something together: all arrive or the missing are named, and one rank's error is every rank's error."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ctj_trainer.checkpoint.errors import MissingRanksError, StorageError

T = TypeVar("T")

_POLL_SECONDS = 0.01
_meetings: Counter[str] = Counter()  # the store keeps its keys: the same meeting held again needs another name


def await_all(group: dist.ProcessGroup, what: str, *, timeout_seconds: float) -> None:
    """Wait until every rank of the group called this with the same `what`.

    Through the key-value store, not by a collective: a rank that waits alone in a collective hangs, here it learns who
    did not come (deepspeedai/DeepSpeed#6836 saved from one rank only).

    Raises:
        MissingRanksError: naming the ranks that did not come.
    """
    store = _get_default_store()
    ranks = dist.get_process_group_ranks(group)
    meeting = f"ctj/arrived/{group.group_name}/{what}"
    _meetings[meeting] += 1
    keys = {rank: f"{meeting}/{_meetings[meeting]}/{rank}" for rank in ranks}
    store.set(keys[dist.get_rank()], "1")
    deadline = time.monotonic() + timeout_seconds
    waiting = set(ranks)
    while waiting:
        waiting = {rank for rank in waiting if not store.check([keys[rank]])}
        if not waiting:
            break
        if time.monotonic() > deadline:
            missing = ", ".join(str(rank) for rank in sorted(waiting))
            raise MissingRanksError(
                f"{what}: rank {missing} did not come within {timeout_seconds:g} s; every rank must take part; "
                "is the call inside an `if rank == 0`, or has that rank failed?"
            )
        time.sleep(_POLL_SECONDS)


@contextmanager
def on_every_rank(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Run the body on every rank; if it fails anywhere, every rank raises and names the first cause.

    The body must hold no collective of its own that a failing rank would leave the others in.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    outcomes: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, f"{type(failure).__name__}: {failure}" if failure else None, group=group)
    if failure is not None:
        raise failure
    for rank, outcome in enumerate(outcomes):
        if outcome is not None:
            raise StorageError(f"{what} failed on rank {rank}: {outcome}")


def from_first(group: dist.ProcessGroup, decide: Callable[[], T]) -> T:
    """Let the group's first rank decide, and tell all; an error there is raised everywhere."""
    message: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            message[0] = decide()
        except Exception as error:
            message[1] = error
    dist.broadcast_object_list(message, group=group, group_src=0)
    if message[1] is not None:
        raise message[1]
    return message[0]  # type: ignore[no-any-return]
