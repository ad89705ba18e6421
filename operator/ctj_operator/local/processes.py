"""Attempts as processes: one supervisor per node on this machine, all of them ending with the runner.

Whatever must outlive the runner is in the child's folder: `child.json` (that it was created), per node `exit.json`,
the log, the control file and the termination message. A node without an exit code and without a process died with an
earlier runner: that is a disruption, not a failure of the job.
"""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctj_api import names
from ctj_api.attempt import Attempt
from ctj_api.control import Control
from ctj_operator.core.observed import Child, ChildState, Pod, PodPhase
from ctj_operator.local import strays
from ctj_operator.local.files import read_json, replace_json
from ctj_operator.local.node import NodeFolder, node_folder

_PR_SET_PDEATHSIG = 1
_KILLED = 137


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a trainer is started on this machine."""

    command: tuple[str, ...]
    checkpoints: Path
    cache: Path
    lock: int
    """Descriptor every supervisor inherits, so that the folder stays held while one of them lives."""
    grace_seconds: float
    """From a polite stop to a kill; saving a checkpoint must fit in."""


class Processes:
    """The children of one job. Start from the main thread only: a parent-death signal fires when the *thread* ends."""

    def __init__(self, children: Path, launch: Launch) -> None:
        self._children = children
        self._launch = launch
        self._running: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self._kill_at: dict[str, float] = {}

    def start(self, attempt: Attempt) -> None:
        """Create the child of `attempt` unless it was created before."""
        name = names.child_name(attempt.job.name, attempt.stage.name, attempt.attempt)
        folder = self._children / name
        if (folder / "child.json").exists():
            return
        nodes = attempt.stage.nodes
        port = _free_port()
        for index in range(nodes):
            node_folder(self._children, name, index).run.mkdir(parents=True, exist_ok=True)
        record = {"name": name, "uid": str(uuid.uuid4()), "attempt": attempt.attempt, "nodes": nodes, "deleted": False}
        replace_json(folder / "child.json", record)
        for index in range(nodes):
            self._spawn(attempt, name, index, port)

    def observe(self) -> tuple[Child, ...]:
        """Return every child that was created and not removed, oldest attempt first."""
        records = [read_json(path) for path in self._children.glob("*/child.json")]
        children = [self._child(record) for record in records if record is not None]
        shown = [child for child in children if not child.deleting or child.state is ChildState.ACTIVE]
        return tuple(sorted(shown, key=lambda child: child.attempt))

    def steer(self, control: Control) -> None:
        """Show `control` to every node of its attempt."""
        for child in self.observe():
            if child.attempt == control.attempt:
                for pod in child.pods:
                    path = node_folder(self._children, child.name, pod.index).control
                    if read_json(path) != control.to_document():
                        replace_json(path, control.to_document())

    def delete(self, uid: str) -> None:
        """Remove a child from sight and stop what runs of it; its folder (logs, reports) stays."""
        for child in self.observe():
            if child.uid == uid:
                path = self._children / child.name / "child.json"
                replace_json(path, {**(read_json(path) or {}), "deleted": True})

    def tend(self, *, now: float) -> None:
        """Do what the Job controller and the kubelet do: stop the rest of a failed or deleted child, then kill it."""
        for child in self.observe():
            broken = child.deleting or any(pod.phase is PodPhase.FAILED for pod in child.pods)
            if child.state is not ChildState.ACTIVE or not broken:
                continue
            if child.name not in self._kill_at:
                self._kill_at[child.name] = now + self._launch.grace_seconds
                self._signal(child.name, signal.SIGTERM)
            elif now >= self._kill_at[child.name]:
                self._signal(child.name, signal.SIGKILL)

    def kill(self) -> None:
        """End everything now, without a checkpoint."""
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait()
        strays.end(names.ENV_CHECKPOINT_ROOT, self._launch.checkpoints)

    def any_exited(self) -> bool:
        """Tell cheaply whether a supervisor ended since the last observation."""
        return any(process.poll() is not None for process in self._running.values())

    def _spawn(self, attempt: Attempt, name: str, index: int, port: int) -> None:
        node = node_folder(self._children, name, index)
        with node.log.open("ab") as log:
            process = subprocess.Popen(
                self._launch.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(attempt, node, index, port),
                pass_fds=(self._launch.lock,),
                start_new_session=True,  # Ctrl-C in a terminal reaches the runner only, which asks for a checkpoint
                preexec_fn=_die_with_parent(),  # noqa: PLW1509 - the runner has one thread
            )
        self._running[name, index] = process
        replace_json(node.process, {"pid": process.pid, "startedAt": strays.started_at(process.pid)})

    def _environment(self, attempt: Attempt, node: NodeFolder, index: int, port: int) -> dict[str, str]:
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            names.ENV_ATTEMPT: attempt.model_dump_json(by_alias=True, exclude_none=True),
            names.ENV_CONTROL_FILE: str(node.control),
            names.ENV_CHECKPOINT_ROOT: str(self._launch.checkpoints),
            names.ENV_CACHE_DIR: str(self._launch.cache),
            names.ENV_RUN_DIR: str(node.run),
            names.ENV_TERMINATION_FILE: str(node.termination),
            names.ENV_NODE_RANK: str(index),
            names.ENV_MASTER_ADDR: "127.0.0.1",
            names.ENV_MASTER_PORT: str(port),
            names.ENV_GRACE_SECONDS: f"{self._launch.grace_seconds:.0f}",
        }
        gpus = attempt.stage.gpus_per_node
        if gpus and attempt.stage.nodes > 1:  # "nodes" share this machine's GPUs
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(index * gpus + gpu) for gpu in range(gpus))
        return environment

    def _child(self, record: dict[str, Any]) -> Child:
        pods = tuple(self._pod(record["name"], index) for index in range(record["nodes"]))
        return Child(
            name=record["name"],
            uid=record["uid"],
            attempt=record["attempt"],
            state=_state_of(pods),
            deleting=bool(record.get("deleted")),
            pods=pods,
            progress=node_folder(self._children, record["name"], 0).progress(),
        )

    def _pod(self, child: str, index: int) -> Pod:
        node = node_folder(self._children, child, index)
        pod_name = f"{child}-{index}"
        process = self._running.get((child, index))
        if process is not None and process.poll() is None:
            return Pod(name=pod_name, index=index, phase=PodPhase.RUNNING)
        if process is not None:
            self._bury(child, index, node, process)
        ended = read_json(node.exit)
        report = node.report()
        if ended is None and report is None:
            return Pod(
                name=pod_name,
                index=index,
                phase=PodPhase.FAILED,
                exit_code=_KILLED,
                reason="RunnerLost",
                message="it ended with the `ctj run` that started it",
                disrupted=True,
            )
        code = int(ended["code"]) if ended is not None else report.exit_code if report is not None else _KILLED
        return Pod(
            name=pod_name,
            index=index,
            phase=PodPhase.SUCCEEDED if code == 0 else PodPhase.FAILED,
            exit_code=code,
            finished_at=node.exit.stat().st_mtime if ended is not None else None,
            report=report,
        )

    def _bury(self, child: str, index: int, node: NodeFolder, process: subprocess.Popen[bytes]) -> None:
        """Record the exit code, once nothing of that node is alive."""
        strays.end(names.ENV_RUN_DIR, node.run)
        code = process.returncode
        replace_json(node.exit, {"code": 128 - code if code < 0 else code})
        del self._running[child, index]

    def _signal(self, child: str, number: signal.Signals) -> None:
        for (name, _), process in self._running.items():
            if name == child:
                process.send_signal(number)


def trainer_command() -> tuple[str, ...]:
    """Return the command of a supervisor: this interpreter, or CTJ_TRAINER_PYTHON where the trainer lives elsewhere."""
    return (trainer_python(), "-m", "ctj_trainer.supervisor")


def trainer_python() -> str:
    """Return the interpreter that has `ctj[trainer]`."""
    chosen = os.environ.get(names.ENV_TRAINER_PYTHON)
    return (shutil.which(chosen) or chosen) if chosen else sys.executable


def _state_of(pods: tuple[Pod, ...]) -> ChildState:
    phases = {pod.phase for pod in pods}
    if PodPhase.RUNNING in phases:
        return ChildState.ACTIVE
    return ChildState.SUCCEEDED if phases == {PodPhase.SUCCEEDED} else ChildState.FAILED


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _die_with_parent() -> Callable[[], None]:
    """Build what runs between fork and exec: a kill when the runner dies, even if that happened just now."""
    if sys.platform != "linux":
        return lambda: None
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork
    parent = os.getpid()

    def leash() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(_KILLED)

    return leash
