"""Who may run a job: one process at a time, told by a flock that the job's trainers inherit.

An flock belongs to the open file, not to the process: it is free only when the runner *and* every supervisor it started
are gone, so a second `ctj run` can never double a job whose trainers survived their runner.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ctj_operator.local.refusal import Refusal
from ctj_operator.local.strays import is_alive, started_at

LOCK_NAME = "lock"
_HANDOVER_SECONDS = 5.0  # a runner's death kills its supervisors, which takes the kernel well under a second


class InUseError(Refusal):
    """Another process runs this job; the message says which, and what to do."""


@contextmanager
def hold(folder: Path, *, command: str) -> Iterator[int]:
    """Hold the job in `folder` and yield the descriptor that its trainers must inherit.

    Raises:
        InUseError: somebody else holds it.
    """
    descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _acquire(descriptor, folder)
        holder = {"pid": os.getpid(), "startedAt": started_at(os.getpid()), "command": command, "since": time.time()}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def holder_of(folder: Path) -> str | None:
    """Say who holds the job in `folder` now; None when nobody does."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _describe(descriptor)[0]
    finally:
        os.close(descriptor)
    return None


def _acquire(descriptor: int, folder: Path) -> None:
    deadline = time.monotonic() + _HANDOVER_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder, pid = _describe(descriptor)
            runner_lives = pid is not None
            if runner_lives or time.monotonic() > deadline:
                raise InUseError(_refusal(folder, holder, pid)) from None
            time.sleep(0.05)


def _describe(descriptor: int) -> tuple[str, int | None]:
    """Return the holder in words, and its pid if that process is still the one that took the lock."""
    try:
        recorded = json.loads(os.pread(descriptor, 4096, 0))
        pid = int(recorded["pid"])
        since = time.strftime("%H:%M:%S", time.localtime(recorded["since"]))
        words = f"pid {pid} (`{recorded['command']}`, since {since})"
        return words, pid if is_alive(pid, recorded["startedAt"]) else None
    except (ValueError, KeyError, TypeError):
        return "an unknown process", None


def _refusal(folder: Path, holder: str, pid: int | None) -> str:
    if pid is None:
        return (
            f"{folder} is still held by trainers of {holder}, which is gone: one folder, one run. "
            f"They are about to end; try again, or see them with: fuser -v {folder / LOCK_NAME}"
        )
    return (
        f"{folder} is in use by {holder}: one folder, one run. Follow it with `ctj watch {folder.name}`, "
        f"stop it with a checkpoint with `kill -INT {pid}`, or give this job another metadata.name or --work-dir."
    )
