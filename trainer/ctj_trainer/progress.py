"""What is the pod doing right now? Local rank 0 writes it, the supervisor and the local backend read it.

A thread renews the file while the step is busy (a compilation may take minutes), so that "slow" and "dead" differ:
a dead process stops renewing; a hung one renews without its step or phase moving on.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ctj_api.attempt import Mode
from ctj_api.names import PROGRESS_FILE
from ctj_api.report import Progress

HEARTBEAT_SECONDS = 1.0
_MIN_INTERVAL_SECONDS = 0.1  # a 30 ms step must not pay for a file each time

STARTING = "Starting"
LOADING = "Loading"
COMPILING = "Compiling"
PROBING = "Probing"
TRAINING = "Training"
EVALUATING = "Evaluating"
SAVING = "Saving"
EXPORTING = "Exporting"
DONE = "Done"


class ProgressWriter:
    """Publish the state of this pod; use as a context manager around the whole run of local rank 0."""

    def __init__(self, run_dir: Path, *, attempt: int, mode: Mode) -> None:
        self._path = run_dir / PROGRESS_FILE
        self._draft = run_dir / f".{PROGRESS_FILE}.{os.getpid()}.tmp"
        self._state: dict[str, Any] = {"attempt": attempt, "step": 0, "phase": STARTING, "mode": mode}
        self._lock = threading.Lock()  # of the state
        self._writing = threading.Lock()  # of the file: a slow disk must not stop the steps
        self._ended = threading.Event()
        self._wake = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="progress-heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self.flush()
        self._heart.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._wake.set()
        self._heart.join()
        self.flush()

    def update(self, **fields: Any) -> None:
        """Set fields of `Progress` (phase=, step=, loss=, ...); a new phase is visible at once, a step within 0.1 s
        or the next heartbeat."""
        with self._lock:
            new_phase = fields.get("phase", self._state["phase"]) != self._state["phase"]
            self._state.update(fields)
        if new_phase:
            self.flush()
        else:
            self._wake.set()

    def flush(self) -> None:
        """Write the state now."""
        with self._writing:
            with self._lock:
                progress = Progress(**self._state, updated_at=time.time())
            try:
                self._draft.write_text(progress.model_dump_json(by_alias=True, exclude_none=True))
                self._draft.replace(self._path)
            except OSError:
                return  # A full disk must not end training from here; the supervisor sees a silent writer.

    def _beat(self) -> None:
        """Write what is new, and at each heartbeat; off the training thread."""
        while not self._ended.is_set():
            self._wake.wait(HEARTBEAT_SECONDS)
            self._wake.clear()
            self.flush()
            self._ended.wait(_MIN_INTERVAL_SECONDS)


def read_progress(run_dir: Path) -> Progress | None:
    """Return the newest state of the pod, or None before its first one."""
    try:
        return Progress.model_validate_json((run_dir / PROGRESS_FILE).read_text())
    except (OSError, ValueError):
        return None


@contextmanager
def compiling(run_dir: Path, *, rank: int | str) -> Iterator[None]:
    """Say that this rank (or one elsewhere) compiles, also in mid-training: the others wait for it and are not hung."""
    flag = run_dir / f"compiling-{rank}"
    with suppress(OSError):
        flag.touch()
    try:
        yield
    finally:
        with suppress(OSError):
            flag.unlink(missing_ok=True)


def who_compiles(run_dir: Path) -> dict[str, float]:
    """Return which ranks of this pod say that they compile, and for how many seconds; `elsewhere`: of another pod."""
    found = {}
    for path in run_dir.glob("compiling-*"):
        with suppress(OSError):
            found[path.name.removeprefix("compiling-")] = max(time.time() - path.stat().st_mtime, 0.0)
    return found


def clear_progress(run_dir: Path) -> None:
    """Forget the state that an earlier process left in the same folder."""
    for path in (run_dir / PROGRESS_FILE, *run_dir.glob("compiling-*")):
        path.unlink(missing_ok=True)
