"""Where do the workers hang? Their Python stacks, by py-spy from outside, or by their own fault handler."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_TIMEOUT_SECONDS = 15.0
_OWN_HANDLER_SECONDS = 2.0


def dump_stacks(workers: dict[int, int], run_dir: Path) -> dict[int, str]:
    """Write `stacks-<rank>.txt` of every worker ({global rank: pid}) and return the texts.

    py-spy reads a process that cannot run Python any more; without it or without the right to trace, each worker's own
    handler writes (child.py registered it for SIGUSR1), which works unless the process is stopped.
    """
    spy = _py_spy()
    texts = {}
    for rank, pid in workers.items():
        text = _by_py_spy(spy, pid) if spy else None
        path = run_dir / f"stacks-{rank}.txt"
        if text is None:
            text = _by_own_handler(pid, path)
        else:
            path.write_text(text)
        texts[rank] = text
    return texts


def where(stacks: dict[int, str]) -> str:
    """Say where each rank's main thread stands, in a few words."""
    return "; ".join(
        f"rank {rank} at {_innermost(text) or 'an unknown place'}" for rank, text in sorted(stacks.items())
    )


def _innermost(text: str) -> str:
    """First frame of the main thread: py-spy names that thread, the fault handler writes it last."""
    threads = re.split(r"^(?=Thread |Current thread )", text, flags=re.MULTILINE)
    main = next((thread for thread in threads if '"MainThread"' in thread), threads[-1])
    return next((line.strip() for line in main.splitlines() if line.startswith((" ", "\t"))), "")


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _by_py_spy(spy: str, pid: int) -> str | None:
    # Without pausing: it hangs already, and pausing a stopped process would never return.
    command = [spy, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 and done.stdout.strip() else None


def _by_own_handler(pid: int, path: Path) -> str:
    try:
        os.kill(pid, signal.SIGUSR1)
    except ProcessLookupError:
        return ""
    deadline = time.monotonic() + _OWN_HANDLER_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if path.exists() and path.stat().st_size:
            time.sleep(0.1)  # the other threads of the same dump
            return path.read_text(errors="replace")
    return ""
