"""How did each rank end? Every rank leaves one mark in the pod's run folder; the first cause among them is the pod's.

A mark is written once, atomically, and never replaced: what a rank says while it dies of a lost peer must not hide what
it said before. Also here: the stop flag by which the supervisor asks its workers for a checkpoint. No torch.
"""

import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ctj_api.exit_codes import ENDED_WELL, ExitCode

MAX_MESSAGE = 1024
MAX_LAST_LINES = 1500
_STOP_FLAG = "stop"


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The end of one rank, in its own words. `at` is seconds since the epoch."""

    rank: int
    kind: ExitCode
    message: str = ""
    last_lines: str = ""
    at: float = 0.0


def write_mark(run_dir: Path, *, rank: int, kind: ExitCode, message: str = "", last_lines: str = "") -> Mark:
    """Leave this rank's mark; the first one stays. Returns the mark that now stands.

    On a full or vanished disk nothing is left: the rank's exit code, which is the mark's kind, must tell alone.
    """
    mark = Mark(
        rank=rank, kind=kind, message=message[:MAX_MESSAGE], last_lines=last_lines[-MAX_LAST_LINES:], at=time.time()
    )
    target = _path(run_dir, rank)
    draft = target.with_suffix(f".{os.getpid()}.tmp")
    text = json.dumps(
        {"kind": kind.name, "message": mark.message, "lastLines": mark.last_lines, "at": mark.at, "rank": rank}
    )
    with suppress(OSError):
        try:
            draft.write_text(text)
            os.link(draft, target)  # fails where a mark stands, unlike a rename
        except FileExistsError:
            return _read(target) or mark
        finally:
            draft.unlink(missing_ok=True)
    return mark


def read_marks(run_dir: Path) -> list[Mark]:
    """Return the marks of this pod's ranks, by rank; what is unreadable is left out."""
    marks = [_read(path) for path in run_dir.glob("mark-*.json")]
    return sorted((mark for mark in marks if mark is not None), key=lambda mark: mark.rank)


def clear_marks(run_dir: Path) -> None:
    """Forget the marks and the stop flag of an earlier process in the same folder."""
    for path in (*run_dir.glob("mark-*.json"), run_dir / _STOP_FLAG):
        path.unlink(missing_ok=True)


def root_cause(marks: Iterable[Mark]) -> Mark | None:
    """Return the earliest failure; a lost peer is a cause only where nobody knows a better one."""
    failures = [mark for mark in marks if mark.kind not in ENDED_WELL]
    own = [mark for mark in failures if mark.kind is not ExitCode.PEER_LOST]
    return min(own or failures, key=lambda mark: mark.at, default=None)


def ended_well(marks: Iterable[Mark], *, ranks: int) -> ExitCode | None:
    """Return DONE or STOPPED if the marks of all `ranks` say so, else None.

    Beside STOPPED a lost peer does no harm: the mark is left after the checkpoint was committed. A silent rank does:
    the agent asks the others to stop when one of them was killed.
    """
    kinds = [mark.kind for mark in marks]
    if len(kinds) < ranks:
        return None
    if ExitCode.STOPPED in kinds and set(kinds) <= {*ENDED_WELL, ExitCode.PEER_LOST}:
        return ExitCode.STOPPED
    return ExitCode.DONE if set(kinds) == {ExitCode.DONE} else None


def request_stop(run_dir: Path, reason: str) -> None:
    """Ask this pod's workers to agree on a checkpoint and end (exit code STOPPED)."""
    draft = run_dir / f".{_STOP_FLAG}.{os.getpid()}.tmp"
    draft.write_text(reason)
    draft.replace(run_dir / _STOP_FLAG)


def stop_requested(run_dir: Path) -> str | None:
    """Return why this pod must stop, or None. Cheap enough for every step."""
    try:
        return (run_dir / _STOP_FLAG).read_text()
    except FileNotFoundError:
        return None


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / f"mark-{rank}.json"


def _read(path: Path) -> Mark | None:
    try:
        document = json.loads(path.read_text())
        return Mark(
            rank=int(document["rank"]),
            kind=ExitCode[document["kind"]],
            message=str(document.get("message", "")),
            last_lines=str(document.get("lastLines", "")),
            at=float(document["at"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
