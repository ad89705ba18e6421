"""What do the workers say? Their output goes to files; it is copied to ours, by rank, and its end remembered."""

import re
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

REMEMBERED_LINES = 40
_CHUNK = 1 << 16
_LOG = re.compile(r"attempt_\d+/(\d+)/(?:stdout|stderr)\.log$")


class WorkerLogs:
    """Follow every worker's stdout and stderr below torchrun's log folder, and the agent's own log quietly."""

    def __init__(self, folder: Path, *, processes: int, global_rank: Callable[[int], int]) -> None:
        self._folder = folder
        self._files = 2 * processes
        self._global_rank = global_rank
        self._followed: dict[Path, _Follower] = {}
        self._last: dict[int, deque[str]] = {}

    def pump(self) -> None:
        """Copy what is new."""
        if len(self._followed) < self._files:
            self._discover()
        for follower in self._followed.values():
            for line in follower.new_lines():
                self._last[follower.rank].append(line)
                sys.stdout.write(f"[rank {follower.rank}] {line}\n")
        sys.stdout.flush()

    def finish(self) -> None:
        """Copy the rest, unfinished lines included."""
        self.pump()
        for follower in self._followed.values():
            if follower.partial:
                self._last[follower.rank].append(follower.partial)
                sys.stdout.write(f"[rank {follower.rank}] {follower.partial}\n")
                follower.partial = ""
        sys.stdout.flush()

    def last_lines(self, rank: int | None) -> str:
        """Return the newest lines of a rank, or of the lowest one."""
        chosen = rank if rank in self._last else min(self._last, default=None)
        return "\n".join(self._last[chosen]) if chosen is not None else ""

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

    def new_lines(self) -> list[str]:
        """Return complete lines written since the last call, a chunk at a time."""
        lines: list[str] = []
        with self._path.open("rb") as file:
            file.seek(self._position)
            while chunk := file.read(_CHUNK):
                self._position += len(chunk)
                *whole, self.partial = (self.partial + chunk.decode(errors="replace")).split("\n")
                lines += whole
        return lines


def tail(path: Path, *, characters: int = 1500) -> str:
    """Return the end of a log file."""
    try:
        return path.read_text(errors="replace")[-characters:]
    except OSError:
        return ""
