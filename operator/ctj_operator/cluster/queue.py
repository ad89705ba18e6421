"""Which job is looked at next: a de-duplicating, keyed work queue for several worker threads.

One key is never handled by two workers at once; a key added while it is handled is handled once more. Two lanes: jobs
with children (finishing, failing, steered) never wait behind a burst of new ones.
"""

import heapq
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

_FIRST_RETRY_SECONDS = 0.25
_LONGEST_RETRY_SECONDS = 300.0
_URGENT_IN_A_ROW = 16  # then one of the others, so that neither lane starves


@dataclass(frozen=True, kw_only=True)
class QueueNumbers:
    """State of the queue for metrics and probes."""

    depth: int
    delayed: int
    working: int
    longest_work_seconds: float


class WorkQueue:
    """Keys waiting for a worker."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, jitter: Callable[[], float] = random.random):
        self._clock = clock
        self._jitter = jitter
        self._changed = threading.Condition()
        self._urgent: OrderedDict[str, float] = OrderedDict()
        self._normal: OrderedDict[str, float] = OrderedDict()
        self._again: dict[str, bool] = {}
        self._working: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        self._failures: dict[str, int] = {}
        self._urgent_in_a_row = 0
        self._closed = False

    def add(self, key: str, *, urgent: bool = False) -> None:
        """Have `key` handled soon, once."""
        with self._changed:
            if key in self._working:
                self._again[key] = urgent or self._again.get(key, False)
                return
            self._put(key, urgent=urgent)
            self._changed.notify()

    def add_later(self, key: str, *, seconds: float) -> None:
        """Have `key` handled after `seconds`, or earlier if something earlier is planned."""
        with self._changed:
            due = self._clock() + seconds
            if due < self._due.get(key, float("inf")):
                self._due[key] = due
                heapq.heappush(self._heap, (due, key))
                self._changed.notify()

    def retry(self, key: str, *, at_least_seconds: float = 0.0) -> float:
        """Have `key` handled again after a back-off that doubles with each retry; return the wait."""
        with self._changed:
            failures = self._failures.get(key, 0)
            self._failures[key] = failures + 1
        longest = min(_LONGEST_RETRY_SECONDS, _FIRST_RETRY_SECONDS * 2 ** min(failures, 32))
        wait: float = max(at_least_seconds, longest * (0.5 + self._jitter() / 2))
        self.add_later(key, seconds=wait)
        return wait

    def forget(self, key: str) -> None:
        """Start the back-off anew: `key` was handled without trouble."""
        with self._changed:
            self._failures.pop(key, None)

    def get(self) -> tuple[str, float] | None:
        """Wait for a key and take it; return it with the seconds it waited, or None when the queue is closed.

        What was planned for later is dropped: whoever handles a key says anew when to look again.
        """
        with self._changed:
            while not self._closed:
                self._move_due()
                if self._urgent or self._normal:
                    return self._take()
                self._changed.wait(timeout=self._next_due())
            return None

    def done(self, key: str) -> None:
        """Give a taken key back."""
        with self._changed:
            del self._working[key]
            if key in self._again:
                self._put(key, urgent=self._again.pop(key))
                self._changed.notify()

    def close(self) -> None:
        """Hand out nothing more; waiting workers get None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def numbers(self) -> QueueNumbers:
        """Say how it goes."""
        with self._changed:
            now = self._clock()
            return QueueNumbers(
                depth=len(self._urgent) + len(self._normal),
                delayed=len(self._due),
                working=len(self._working),
                longest_work_seconds=max((now - since for since in self._working.values()), default=0.0),
            )

    def _put(self, key: str, *, urgent: bool) -> None:
        since = self._normal.pop(key, None) if urgent else None
        if key in self._urgent or (not urgent and key in self._normal):
            return
        (self._urgent if urgent else self._normal)[key] = self._clock() if since is None else since

    def _take(self) -> tuple[str, float]:
        turn_of_normal = self._normal and self._urgent_in_a_row >= _URGENT_IN_A_ROW
        lane = self._urgent if self._urgent and not turn_of_normal else self._normal
        self._urgent_in_a_row = self._urgent_in_a_row + 1 if lane is self._urgent else 0
        key, since = lane.popitem(last=False)
        now = self._clock()
        self._working[key] = now
        self._due.pop(key, None)
        return key, now - since

    def _move_due(self) -> None:
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            due, key = heapq.heappop(self._heap)
            if self._due.get(key) != due:
                continue  # dropped, or planned earlier since
            del self._due[key]
            if key in self._working:
                self._again.setdefault(key, False)
            else:
                self._put(key, urgent=False)

    def _next_due(self) -> float | None:
        return max(0.0, self._heap[0][0] - self._clock()) if self._heap else None
