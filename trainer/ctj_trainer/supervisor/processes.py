"""How are the processes below us bound to us, found, and ended? Linux; elsewhere binding and finding do nothing."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from ctj_api import names

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
_PTRACER_ANY = ctypes.c_ulong(-1)


def die_with_parent(parent: int | None = None) -> None:
    """Be killed when the process that started us dies; `parent` closes the gap before this line.

    The kernel sends the signal when the parent's *thread* ends: start children from a thread that lives on.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def parent_from_environment() -> int | None:
    """Return the pid that agent and workers were told to live below."""
    text = os.environ.get(names.ENV_PARENT, "")
    return int(text) if text.isdigit() else None


def adopt_orphans() -> None:
    """Become the parent of whatever our descendants leave behind, so that it can be found and ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def allow_stack_dumps() -> None:
    """Let py-spy, a sibling of the worker, read its stacks where Yama restricts that to parents."""
    _prctl(_PR_SET_PTRACER, _PTRACER_ANY)


def children_of(pid: int) -> list[int]:
    """Return the direct children of a process."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue  # it ended
        state, parent = stat.rpartition(")")[2].split()[:2]
        if int(parent) == pid and state != "Z":
            found.append(int(entry.name))
    return sorted(found)


def workers_of(agent: int) -> dict[int, int]:
    """Return the pids of the agent's workers by local rank."""
    workers = {}
    for pid in children_of(agent):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        rank = next((entry[len(b"LOCAL_RANK=") :] for entry in environment if entry.startswith(b"LOCAL_RANK=")), b"")
        if rank.isdigit():
            workers[int(rank)] = pid
    return workers


def kill_group(pid: int) -> None:
    """Kill a worker with everything in its session (compile and data processes)."""
    for send in (os.killpg, os.kill):
        try:
            send(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def end_descendants(*, patience: float = 10.0) -> None:
    """Kill and reap everything below this process; orphans have come to us, see `adopt_orphans`."""
    deadline = time.monotonic() + patience
    while (left := children_of(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            kill_group(pid)
        time.sleep(0.02)
        _reap(left)


def _reap(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue


def _prctl(option: int, value: object) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
