"""Which processes belong to a job's folder, and how are they ended for certain?

Trainers die with their runner by parent-death signals. This is the net below: whatever still carries the folder in its
environment is found in /proc and killed by pid. Nothing is found on systems without /proc.
"""

import os
import signal
import time
from pathlib import Path

from ctj_api.exit_codes import RunExit
from ctj_operator.local.refusal import Refusal

_PATIENCE_SECONDS = 10.0


def started_at(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot: with the pid it names one process for ever."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def is_alive(pid: int, start: int | None) -> bool:
    """Tell whether the process that had `pid` when it started at `start` still runs."""
    if start is not None:
        return started_at(pid) == start and not _is_zombie(pid)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def find(variable: str, folder: Path) -> list[int]:
    """Return the processes whose environment says `variable=folder`, this one excepted."""
    needle = f"{variable}={folder}".encode()
    return [
        int(entry.name)
        for entry in Path("/proc").glob("[0-9]*")
        if int(entry.name) != os.getpid()
        and needle in _environment(entry).split(b"\0")
        and not _is_zombie(int(entry.name))
    ]


def end(variable: str, folder: Path) -> list[int]:
    """Kill every process whose environment says `variable=folder`, and return their pids once they are gone."""
    ended: list[int] = []
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while strays := find(variable, folder):
        for pid in strays:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            ended.append(pid)
        if time.monotonic() > deadline:
            raise Refusal(
                f"processes {strays} of {folder} do not die: they wait in the kernel (a hung disk or device?)",
                exit_code=RunExit.ENVIRONMENT,
            )
        time.sleep(0.02)
    return sorted(set(ended))


def _environment(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:  # gone, or somebody else's
        return b""


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
