"""What do the workers say? Their output goes to files; it is copied to ours, by rank, and its end remembered.

A job that prints for weeks must not fill the disk: what is copied is given back, and of our own output, where that is a
file (`ctj run`; a kubelet turns over its logs itself), the beginning and the end are kept. Holes are punched, so nobody
who writes or reads has to take part: files keep their length and positions.
"""

import ctypes
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

REMEMBERED_LINES = 40
_CHUNK = 1 << 16
HEAD_BYTES = 4 << 20  # the start of an attempt: settings, compilation, the first steps
TAIL_BYTES = 28 << 20
_STEP = 1 << 20  # given back at a time
_PAGE = 1 << 12
_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_STDOUT = 1
_LOG = re.compile(r"attempt_\d+/(\d+)/(?:stdout|stderr)\.log$")


class WorkerLogs:
    """Follow every worker's stdout and stderr below torchrun's log folder, and the agent's own log quietly."""

    def __init__(self, folder: Path, *, processes: int, global_rank: Callable[[int], int]) -> None:
        self._folder = folder
        self._files = 2 * processes
        self._global_rank = global_rank
        self._followed: dict[Path, _Follower] = {}
        self._last: dict[int, deque[str]] = {}
        self._own = BoundedFile(_STDOUT)

    def pump(self) -> None:
        """Copy what is new."""
        if len(self._followed) < self._files:
            self._discover()
        for follower in self._followed.values():
            self._copy(follower.new_lines(), rank=follower.rank)
        self._own.keep_ends()

    def finish(self) -> None:
        """Copy the rest, unfinished lines included."""
        self.pump()
        for follower in self._followed.values():
            if follower.partial:
                self._copy([follower.partial], rank=follower.rank)
                follower.partial = ""

    def last_lines(self, rank: int | None) -> str:
        """Return the newest lines of a rank, or of the lowest one."""
        chosen = rank if rank in self._last else min(self._last, default=None)
        return "\n".join(self._last[chosen]) if chosen is not None else ""

    def _copy(self, lines: Sequence[str], *, rank: int) -> None:
        if lines:
            self._last[rank].extend(lines)
            write_out("".join(f"[rank {rank}] {line}\n" for line in lines))

    def _discover(self) -> None:
        for path in self._folder.glob("*/attempt_*/*/std*.log"):
            match = _LOG.search(path.as_posix())
            if path not in self._followed and match:
                rank = self._global_rank(int(match.group(1)))
                self._followed[path] = _Follower(path, rank)
                self._last.setdefault(rank, deque(maxlen=REMEMBERED_LINES))


class _Follower:
    def __init__(self, path: Path, rank: int) -> None:
        self.rank = rank
        self.partial = ""
        self._path = path
        self._position = 0
        self._freed = 0

    def new_lines(self) -> list[str]:
        """Return complete lines written since the last call, a chunk at a time."""
        lines: list[str] = []
        with self._path.open("r+b") as file:
            file.seek(self._position)
            while chunk := file.read(_CHUNK):
                self._position += len(chunk)
                *whole, self.partial = (self.partial + chunk.decode(errors="replace")).split("\n")
                lines += whole
                if len(self.partial) >= _CHUNK:  # a progress bar may never end its line
                    lines.append(self.partial)
                    self.partial = ""
            if self._position - self._freed >= _STEP:
                punch(file.fileno(), self._freed, self._position)
                self._freed = self._position
        return lines


def write_out(text: str) -> None:
    """Write to our own output, unbuffered. A full disk or a closed pipe costs lines, never the attempt."""
    left = text.encode(errors="replace")
    with suppress(OSError):
        while left:
            left = left[os.write(_STDOUT, left) :]


class BoundedFile:
    """A file that somebody appends to: its first and last bytes are kept."""

    def __init__(self, descriptor: int, *, head: int = HEAD_BYTES, tail: int = TAIL_BYTES) -> None:
        self._descriptor = descriptor
        self._tail = tail
        self._freed = head

    def keep_ends(self) -> None:
        """Give the middle back to the disk, once that is worth a call."""
        status = os.fstat(self._descriptor)
        end = (status.st_size - self._tail) // _PAGE * _PAGE
        if stat.S_ISREG(status.st_mode) and end - self._freed >= _STEP:
            punch(self._descriptor, self._freed, end)
            self._freed = end


def punch(descriptor: int, start: int, end: int) -> None:
    """Give the disk space of [start, end) back; it reads as zeros. Where a file system cannot, all of it is kept."""
    fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
    if fallocate is not None:
        fallocate(descriptor, _PUNCH_HOLE, ctypes.c_long(start), ctypes.c_long(end - start))


def tail(path: Path, *, characters: int = 1500) -> str:
    """Return the end of a log file."""
    try:
        return path.read_text(errors="replace")[-characters:]
    except OSError:
        return ""
