"""The loop of `ctj run`: reconcile one local job until it is over, Held or stopped, and say what happens meanwhile.

It decides nothing: it finds the moments to look again (a process ended, a person edited the job, a timer), and turns
Ctrl-C into the observation that the job is suspended.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from ctj_api import names
from ctj_api.exit_codes import RunExit
from ctj_api.report import Progress
from ctj_api.status import Phase, Status
from ctj_operator.core.decision import Decision, Event
from ctj_operator.core.observed import ChildState
from ctj_operator.core.reconcile import Conflict, reconcile
from ctj_operator.local.backend import LocalBackend
from ctj_operator.local.node import node_folder
from ctj_operator.local.processes import Launch, Processes
from ctj_operator.local.store import JOB_FILE, Store, StoredJob

_TICK_SECONDS = 0.1
_SHOW_SECONDS = 0.25
_LOOK_SECONDS = 1.0  # longest time between two looks: what a trainer reports shows in status within it
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_OUTCOMES = {
    Phase.SUCCEEDED: RunExit.SUCCEEDED,
    Phase.FAILED: RunExit.FAILED,
    Phase.HELD: RunExit.HELD,
    Phase.SUSPENDED: RunExit.STOPPED,
}


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One moment of a job, for people."""

    job: StoredJob
    status: Status
    progress: Progress | None
    """Of the current attempt; fresher than the status."""
    now: float


class Screen(Protocol):
    """Where people look."""

    def event(self, event: Event) -> None:
        """Show something that happened."""

    def note(self, message: str) -> None:
        """Show what the runner itself does."""

    def show(self, snapshot: Snapshot) -> None:
        """Show where the job is; called four times a second."""


class Runner:
    """Runs the job of one folder; the folder's lock is held by the caller."""

    def __init__(self, store: Store, launch: Launch, screen: Screen) -> None:
        self._store = store
        self._screen = screen
        self._processes = Processes(store.children, launch)
        self._backend = LocalBackend(store, self._processes, announce=screen.event)
        self._key = store.read_job().identity.name
        self._interrupts = 0
        self._look_at = 0.0
        self._show_at = 0.0
        self._seen_edit = 0

    def run(self) -> RunExit:
        """Return how it ended; whatever happens, no trainer is left behind."""
        assert threading.current_thread() is threading.main_thread()
        with self._signals():
            try:
                return self._loop()
            finally:
                self._processes.kill()

    def _loop(self) -> RunExit:
        status = self._store.read_status().status
        stopping = False
        while self._interrupts < 2:
            if self._interrupts and not stopping:
                stopping = self._backend.stop_requested = True
                self._screen.note("Stopping: saving a checkpoint at the next step. Ctrl-C again ends it without one.")
                self._look_at = 0.0
            if self._must_look():
                status = self._look(status)
                if (outcome := self._outcome(status)) is not None:
                    self._screen.show(snapshot(self._store, status))
                    return outcome
            if time.monotonic() >= self._show_at:
                self._show_at = time.monotonic() + _SHOW_SECONDS
                self._screen.show(snapshot(self._store, status))
            time.sleep(_TICK_SECONDS)
        return RunExit.STOPPED

    def _must_look(self) -> bool:
        edit = (self._store.folder / JOB_FILE).stat().st_mtime_ns
        edited, self._seen_edit = edit != self._seen_edit, edit
        return edited or self._processes.any_exited() or time.monotonic() >= self._look_at

    def _look(self, before: Status) -> Status:
        try:
            decision = reconcile(self._backend, self._key)
        except Conflict:  # a verb was stored between our read and our write: look again
            self._look_at = 0.0
            return before
        assert decision is not None
        self._look_at = time.monotonic() + self._pause(before, decision)
        return decision.status

    def _pause(self, before: Status, decision: Decision) -> float:
        """Wait not at all after a change (the next step may be due), else until something can be new."""
        if decision.status != before or decision.create is not None or decision.delete:
            return 0.0
        return min(_LOOK_SECONDS, decision.requeue_after or _LOOK_SECONDS)

    def _outcome(self, status: Status) -> RunExit | None:
        if any(child.state is ChildState.ACTIVE for child in self._processes.observe()):
            return None
        return _OUTCOMES.get(status.phase)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def interrupt(_number: int, _frame: FrameType | None) -> None:
            self._interrupts += 1

        before = {number: signal.signal(number, interrupt) for number in _STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def snapshot(store: Store, status: Status) -> Snapshot:
    """Read what a person may want to see now."""
    job, current, progress = store.read_job(), status.current, None
    if current is not None:
        child = names.child_name(job.identity.name, current.stage, current.attempt)
        progress = node_folder(store.children, child, 0).progress()
    return Snapshot(job=job, status=status, progress=progress, now=time.time())
