"""How do the tests start a real process and be sure that it ends?

Each process notes its pid in a file and writes a log; it dies with its parent unless it is meant to stay; it is stopped
by pid, never by name, and only if the pid still is the process that was started.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

# exec'd in between because Popen's preexec_fn forks for real, which is not safe once a test has imported torch.
_TIED = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9)\n"  # PR_SET_PDEATHSIG, SIGKILL
    "os.getppid() == int(sys.argv[1]) or sys.exit('parent is gone')\n"
    "os.execvp(sys.argv[2], sys.argv[2:])\n"
)


def tied(command: Sequence[str]) -> list[str]:
    """Return `command` such that it dies with the thread that starts it (so start it from a lasting one)."""
    return [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command]


def start(
    name: str, command: Sequence[str], *, directory: Path, env: Mapping[str, str] | None = None, lasting: bool = False
) -> "subprocess.Popen[bytes]":
    """Start `command` with its log in directory/log and its pid in directory/pid; lasting ones outlive us."""
    for part in ("log", "pid"):
        (directory / part).mkdir(parents=True, exist_ok=True)
    with (directory / "log" / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            list(command) if lasting else tied(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=None if env is None else dict(env),
            start_new_session=True,
        )
    (directory / "pid" / name).write_text(f"{process.pid} {_started_at(process.pid)}\n")
    return process


def stop(process: "subprocess.Popen[bytes]", *, grace_seconds: float = 5.0) -> int:
    """Ask, wait, then kill; returns the exit status."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


def stop_by_pid_file(file: Path, *, grace_seconds: float = 5.0) -> None:
    """Stop a process some earlier command started, if its pid was not given to another one since."""
    pid, started_at = file.read_text().split()
    deadline = time.monotonic() + grace_seconds
    number = signal.SIGTERM
    while _started_at(int(pid)) == started_at:
        os.kill(int(pid), number)
        if time.monotonic() > deadline:
            number = signal.SIGKILL
        time.sleep(0.1)
    file.unlink()


def _started_at(pid: int) -> str:
    """Start time in clock ticks since boot, which with the pid names one process; empty if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] == "Z" else fields[19]
