"""Which rank compiles at this moment, in any pod? Every rank says it in the store that the ranks met in.

The rank that waits reads it: to wait longer, and to name who is late instead of blaming the network. Nothing here is a
collective, so it also works while others stand in one.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ctj_trainer.compile.errors import LateRankError
from ctj_trainer.progress import compiling as flag

_ACTIVE = "ctj/compiling"
_LONGEST_PAUSE_SECONDS = 0.5
LOOK_SECONDS = 1.0
ELSEWHERE = "elsewhere"


class CompileBoard:
    """Notes in the store; a store that is gone costs a note, never the training."""

    def __init__(self, store: Any, *, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._meetings = 0
        self._mine = 0

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Say that this rank compiles."""
        self._note(+1)
        try:
            yield
        finally:
            self._note(-1)

    def count(self) -> int:
        """How many ranks compile now.

        Raises:
            RuntimeError: the store is gone.
        """
        return int(self._store.add(_ACTIVE, 0))

    def elsewhere(self) -> int:
        """The same, without this rank."""
        return self.count() - self._mine

    def who(self) -> str:
        """Name the ranks that compile and since when, by their own clocks; empty if none does or nobody can tell."""
        with suppress(RuntimeError):
            if self.count():
                since = {rank: self._since(rank) for rank in range(self._world_size)}
                now = time.time()
                late = [f"rank {rank} for {max(now - at, 0):.0f} s" for rank, at in since.items() if at]
                return "still compiling: " + ", ".join(late) if late else ""
        return ""

    def meet(self, *, timeout_seconds: float) -> None:
        """Wait until every rank has come here. Collective.

        Raises:
            LateRankError: one has not come in time; it is named, with its seconds so far if it compiles.
        """
        self._meetings += 1
        place = f"ctj/met-{self._meetings}"
        self._store.set(f"{place}/{self._rank}", "here")
        self._store.add(place, 1)
        deadline, pause = time.monotonic() + timeout_seconds, 0.005
        while self._store.add(place, 0) < self._world_size:
            if time.monotonic() >= deadline:
                self._store.set(f"{place}/over", self._late(place, timeout_seconds))
            if self._store.check([f"{place}/over"]):
                break
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)
        if self._store.check([f"{place}/over"]):  # also for the late one: the others are gone
            raise LateRankError(self._store.get(f"{place}/over").decode())

    def _late(self, place: str, timeout_seconds: float) -> str:
        missing = [rank for rank in range(self._world_size) if not self._store.check([f"{place}/{rank}"])]
        names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        what = self.who() or "none of them says that it compiles"
        return (
            f"rank {self._rank} waited {timeout_seconds:g} s (spec.compile.timeoutSeconds) for rank {names} to end its "
            f"warm-up; {what}"
        )

    def _note(self, change: int) -> None:
        self._mine += change
        with suppress(RuntimeError):
            self._store.set(f"{_ACTIVE}/{self._rank}", str(time.time()) if change > 0 else "")
            self._store.add(_ACTIVE, change)

    def _since(self, rank: int) -> float:
        key = f"{_ACTIVE}/{rank}"
        text = self._store.get(key) if self._store.check([key]) else b""
        return float(text or 0)


@contextmanager
def mirrored(board: CompileBoard, run_dir: Path) -> Iterator[None]:
    """Show this pod's supervisor that a rank of another pod compiles, by the flag that a rank of this pod would set.

    For one rank of each pod. A thread of its own: a store that does not answer must not stop the pod's heartbeat.
    """
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(LOOK_SECONDS):
            try:
                if not board.elsewhere():
                    continue
                with flag(run_dir, rank=ELSEWHERE):
                    while board.elsewhere() and not ended.wait(LOOK_SECONDS):
                        pass
            except RuntimeError:
                return  # the store is gone, and with it the ranks

    thread = threading.Thread(target=watch, name="compile-board", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(2 * LOOK_SECONDS)


def alone() -> CompileBoard:
    """The board of a process without others."""
    return CompileBoard(dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # re-exported
