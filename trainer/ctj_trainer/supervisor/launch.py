"""With which command and environment is torchrun's agent started?"""

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ctj_api import names
from ctj_api.spec import Strategy
from ctj_trainer.compile.cache_folder import ENV_FOLDER
from ctj_trainer.supervisor.settings import Settings
from ctj_trainer.trackers import PACKAGES

LOGS = "logs"
RECORD = "agent.json"


def missing_package(settings: Settings) -> str | None:
    """Return one line if the ladder or a tracker needs a package this Python lacks: better now than hours later."""
    ours = "'ctj[trainer]'"
    needed = {"torch": ("training", ours)}
    for stage in settings.attempt.ladder:
        if stage.strategy is Strategy.ZERO3:
            needed["deepspeed"] = (f"stage {stage.name} (strategy zero3)", ours)
    for tracker in settings.attempt.training.trackers:
        user = f"spec.training.trackers ({tracker})"
        needed |= {"accelerate": (user, ours), PACKAGES[tracker]: (user, PACKAGES[tracker])}
    for package, (user, source) in needed.items():
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed in {sys.executable}, and {user} needs it: pip install {source}"
    return _missing_store(settings.attempt.training.checkpoint.url)


def _missing_store(url: str | None) -> str | None:
    if url is None:
        return None
    from fsspec import get_filesystem_class

    try:
        get_filesystem_class(url.partition("://")[0])
    except (ImportError, ValueError) as error:  # no such protocol, or its package is not installed: fsspec says which
        return f"spec.training.checkpoint.url is {url!r}: {error}"
    return None


def start_agent(settings: Settings, *, compile_cache: Path) -> "subprocess.Popen[bytes]":
    """Start the agent in its own session: signals to our process group must not make it kill the workers."""
    log = (settings.run_dir / "agent.log").open("wb")
    with log:
        return subprocess.Popen(
            agent_command(settings),
            env=agent_environment(settings, os.environ, compile_cache=compile_cache),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def agent_command(settings: Settings) -> list[str]:
    """Build torchrun's command line: static rendezvous, no restarts of its own, output into files."""
    port = settings.master_port or _free_port()
    options = {
        "nnodes": settings.nodes,
        "node-rank": settings.node_rank,
        "nproc-per-node": settings.local_processes,
        "master-addr": settings.master_addr,
        "master-port": port,
        "rdzv-backend": "static",
        "rdzv-id": f"attempt-{settings.attempt.attempt}",
        "max-restarts": 0,
        "monitor-interval": 0.1,
        "log-dir": settings.run_dir / LOGS,
        "redirects": 3,
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "ctj_trainer.supervisor.agent", *flags, "-m", "ctj_trainer.supervisor.child"]


def agent_environment(settings: Settings, outer: Mapping[str, str], *, compile_cache: Path) -> dict[str, str]:
    """Build the environment of agent and workers; what the pod's owner set stays."""
    return {
        # Compiled CPU code contains the number of threads: one number for the whole ladder, or no stage could use
        # what the one before compiled.
        "OMP_NUM_THREADS": str(max(1, _processors() // max(s.local_processes for s in settings.attempt.ladder))),
        **({"GLOO_SOCKET_IFNAME": "lo"} if settings.nodes == 1 and sys.platform == "linux" else {}),
        **outer,
        "PYTHONUNBUFFERED": "1",
        ENV_FOLDER: str(compile_cache),
        names.ENV_AGENT_RECORD: str(settings.run_dir / RECORD),
        names.ENV_PARENT: str(os.getpid()),
        names.ENV_WORKER_MODULE: settings.worker_module,
        names.ENV_RUN_DIR: str(settings.run_dir),
    }


def _processors() -> int:
    """Processors of this pod: its affinity, or its control group's quota where that is less."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):  # control group v1, or "max"
        return count


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
