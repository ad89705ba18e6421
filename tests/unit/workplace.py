"""A folder to run jobs in, with a stand-in where the supervisor would be: the one seam of the local backend."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctj_operator.cli.main import main

STAND_IN = Path(__file__).with_name("stand_in_supervisor.py")
_PYTHON = """#!/bin/sh
# An interpreter "with the trainer": the supervisor is the stand-in, anything else is the real Python.
if [ "$2" = ctj_trainer.supervisor ]; then exec {python} {stand_in}; fi
exec {python} "$@"
"""


def job_document(**spec: Any) -> dict[str, Any]:
    """Return a two-stage job of 12 steps that the stand-in trains in a fraction of a second."""
    defaults = {
        "recipe": {"name": "stand_in:build", "config": {"stepSeconds": 0.01}},
        "training": {"steps": 12, "globalBatchSize": 8, "microBatchSize": 2, "checkpoint": {"everySteps": 2}},
        "ladder": [
            {"name": "single", "strategy": "single", "steps": 6},
            {"name": "ddp", "strategy": "ddp", "processesPerNode": 2},
        ],
    }
    return {
        "apiVersion": "training.ctj.dev/v1alpha1",
        "kind": "CompiledTrainingJob",
        "metadata": {"name": "tiny"},
        "spec": {**defaults, **spec},
    }


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A finished command."""

    code: int
    out: str
    err: str


class Workplace:
    """Runs `ctj` in a folder of its own: in this process, or as one that can be killed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self.job_folder = folder / "ctj-runs" / "tiny"
        self.python = folder / "python-with-trainer"
        self.python.write_text(_PYTHON.format(python=sys.executable, stand_in=STAND_IN))
        self.python.chmod(0o755)
        monkeypatch.chdir(folder)
        monkeypatch.setenv("CTJ_TRAINER_PYTHON", str(self.python))
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))

    def write_job(self, **spec: Any) -> Path:
        """Write `job.yaml`."""
        path = self.folder / "job.yaml"
        path.write_text(yaml.safe_dump(job_document(**spec)))
        return path

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `ctj ARGUMENTS` as a process."""
        return subprocess.Popen(
            [sys.executable, "-m", "ctj_operator.cli.main", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ctj(self, *arguments: str) -> Ended:
        """Run `ctj ARGUMENTS` to its end, here: its imports are paid for once."""
        self._monkeypatch.setattr(sys, "argv", ["ctj", *arguments])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as exited:
            main()
        out, err = self._capsys.readouterr()
        return Ended(code=int(exited.value.code or 0), out=out, err=err)

    def status(self) -> dict[str, Any]:
        """Return the stored status."""
        document: dict[str, Any] = json.loads((self.job_folder / "status.json").read_text())["status"]
        return document

    def steps_trained(self) -> int:
        """Return the newest step the stand-in recorded."""
        lines = [
            line for path in self.job_folder.glob("checkpoints/*/steps.jsonl") for line in path.read_text().splitlines()
        ]
        return max((json.loads(line)["step"] for line in lines), default=0)

    def processes(self) -> list[int]:
        """Return what still trains below this folder, workers included."""
        needle = f"CTJ_CHECKPOINT_ROOT={self.folder}".encode()
        return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if needle in _read(path)]

    def until(self, reached: Callable[[], bool], *, seconds: float = 20.0) -> None:
        """Wait for `reached`."""
        deadline = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < deadline, "it did not come to that"
            time.sleep(0.02)


def end(process: subprocess.Popen[str], number: signal.Signals) -> Ended:
    """Send a signal and wait for the end."""
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    return Ended(code=process.returncode, out=out, err=err)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
