"""The supervisor with the real torchrun agent and real worker processes (`fake_worker.py`: everything but a model).

An agent's start imports torch, so one start serves several statements.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.supervised import an_attempt, environment_of

from ctj_api import names
from ctj_api.control import Control, StopControl
from ctj_api.exit_codes import ExitCode
from ctj_api.report import Report
from ctj_trainer.progress import read_progress

PATIENCE_SECONDS = 120.0
FOREVER = [["train", 100_000]]


class Pod:
    """One supervisor in its own folder."""

    def __init__(self, folder: Path, plan: dict[str, list[Any]], **settings: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.log = folder / "log"
        node, port = settings.pop("node", 0), settings.pop("port", 0)
        extra = settings.pop("environment", {})
        attempt = an_attempt(**settings)
        self.environment = {
            **os.environ,
            **environment_of(attempt, folder, node=node, port=port),
            "CTJ_WORKER_MODULE": "fake_worker",
            "PYTHONPATH": str(Path(__file__).parent),
            "FAKE_WORKER": json.dumps(plan),
            **extra,
        }
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def start(self, *, command: tuple[str, ...] = ("-m", "ctj_trainer.supervisor")) -> "Pod":
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command], env=self.environment, stdout=log, stderr=subprocess.STDOUT
            )
        return self

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(PATIENCE_SECONDS)

    def until_step(self, step: int) -> None:
        self.until(lambda: (read_progress(self.run_dir) or _NO_PROGRESS).step >= step)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)

    @property
    def output(self) -> str:
        return self.log.read_text()

    @property
    def report(self) -> Report:
        return Report.model_validate_json((self.folder / "termination.json").read_bytes())

    def alive(self) -> list[int]:
        """Every process that carries this pod's run folder in its environment."""
        needle = f"{names.ENV_RUN_DIR}={self.run_dir}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                ours = needle in (entry / "environ").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if ours and state != "Z":
                found.append(int(entry.name))
        return found

    def end(self) -> None:
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class _NoProgress:
    step = -1


_NO_PROGRESS = _NoProgress()
MakePod = Callable[..., Pod]


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[MakePod]:
    pods: list[Pod] = []

    def make(plan: dict[str, list[Any]], *, name: str = "pod", **settings: Any) -> Pod:
        pods.append(Pod(tmp_path / name, plan, **settings))
        return pods[-1]

    yield make
    for made in pods:
        made.end()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def fetch(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def test_a_stage_from_start_to_report(pod: MakePod) -> None:
    port = free_port()
    settings = {"environment": {names.ENV_METRICS_PORT: str(port)}}
    stage = pod({"0": [["train", 60], ["report"]], "1": [["train", 60]]}, **settings).start()

    stage.until_step(2)
    for rank in (0, 1):
        sample = f'ctj_train_step{{attempt="1",job="tiny",namespace="research",rank="{rank}",stage="ddp"}} '
        stage.until(lambda sample=sample: fetch(port, "/metrics").count(sample) == 1)
    assert json.loads(fetch(port, "/progress"))["phase"] == "Training"
    assert fetch(port, "/healthz") == "ok\n"

    assert stage.wait() == ExitCode.DONE
    assert stage.report.measurements == {"finalLoss": 0.5}
    assert stage.report.failure is None
    whole = stage.folder / "checkpoints" / "attempt-00001" / "report.json"
    assert Report.model_validate_json(whole.read_bytes()) == stage.report
    assert {"[rank 0] hello from 0", "[rank 1] hello from 1"} <= set(stage.output.splitlines())
    assert stage.alive() == []


def test_an_error_is_reported_with_its_traceback_whatever_else_was_written(pod: MakePod) -> None:
    plan = {"*": [["say", "noise" * 30, 400], ["report", "{half"], ["raise", "boom"]]}
    failed = pod(plan, processes=1).start()

    assert failed.wait() == ExitCode.USER_CODE_OR_IMAGE
    assert (failed.folder / "termination.json").stat().st_size <= 4096
    failure = failed.report.failure
    assert failure is not None
    assert (failure.rank, failure.message) == (0, "ValueError: boom")
    assert "ValueError: boom" in failure.last_lines
    assert any("could not be read" in notice for notice in failed.report.notices)


def test_a_killed_worker_ends_the_pod_as_killed(pod: MakePod) -> None:
    killed = pod({"0": FOREVER, "1": [["train", 3], ["kill_self"]]}).start()

    assert killed.wait() == ExitCode.KILLED
    failure = killed.report.failure
    assert failure is not None
    assert failure.rank == 1
    assert killed.report.step > 0
    assert killed.alive() == []


def test_nothing_outlives_whoever_started_the_supervisor(pod: MakePod) -> None:
    starter = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'ctj_trainer.supervisor'])"
    left = pod({"*": FOREVER}).start(command=("-c", starter))
    left.until_step(1)
    assert len(left.alive()) == 5  # the starter, the supervisor, the agent and two workers

    assert left.process is not None
    left.process.kill()
    left.process.wait()
    left.until(lambda: left.alive() == [])


def test_a_hang_is_found_and_shows_where(pod: MakePod) -> None:
    hanging = pod({"*": [["hang_here"]]}, environment={"CTJ_HANG_SECONDS": "3"}).start()

    assert hanging.wait() == ExitCode.HANG
    failure = hanging.report.failure
    assert failure is not None
    assert "do_hang_here" in failure.message
    for rank in (0, 1):
        assert "do_hang_here" in (hanging.run_dir / f"stacks-{rank}.txt").read_text()
    assert hanging.alive() == []


def test_a_deleted_pod_saves_and_says_so(pod: MakePod) -> None:
    deleted = pod({"*": FOREVER}).start()
    deleted.until_step(2)

    assert deleted.process is not None
    os.killpg(os.getpgid(deleted.process.pid), signal.SIGTERM)
    assert deleted.wait() == ExitCode.STOPPED
    assert deleted.report.failure is None
    assert deleted.report.checkpoint is not None
    assert deleted.report.checkpoint.step == deleted.report.step


def test_a_save_longer_than_the_agents_own_patience_is_not_cut_C53(pod: MakePod) -> None:
    """C53: torchrun kills workers 30 s after SIGTERM; the pod has 300 s, less 15 for the launcher's own end."""
    slow = pod({"*": [["train_and_save", 33.0]]}, environment={names.ENV_GRACE_SECONDS: "300"}).start()
    slow.until_step(2)

    assert slow.process is not None
    began = time.monotonic()
    os.killpg(os.getpgid(slow.process.pid), signal.SIGTERM)
    assert slow.wait() == ExitCode.STOPPED
    assert time.monotonic() - began > 33
    assert slow.report.checkpoint is not None
    assert slow.report.checkpoint.step == slow.report.step
    assert slow.alive() == []


def test_control_stops_an_attempt_and_other_attempts_control_does_not(pod: MakePod) -> None:
    asked = pod({"*": FOREVER}).start()

    def say(**control: Any) -> None:
        text = Control(stop=StopControl.CHECKPOINT, reason="suspended", **control).model_dump_json(by_alias=True)
        draft = asked.folder / "draft"
        draft.write_text(text)
        draft.replace(asked.folder / "control.json")

    asked.until_step(1)
    say(attempt=2, sequence=9)
    asked.until_step(10)
    say(attempt=1, sequence=1)
    assert asked.wait() == ExitCode.STOPPED
    assert "suspended" in asked.output


def test_a_stop_before_the_first_step_does_not_wait_for_the_compiler(pod: MakePod) -> None:
    compiling = pod({"*": [["compile", 1000]]}, environment={names.ENV_GRACE_SECONDS: "1000"}).start()
    compiling.until(lambda: (seen := read_progress(compiling.run_dir)) is not None and seen.phase == "Compiling")

    assert compiling.process is not None
    compiling.process.terminate()
    assert compiling.wait() == ExitCode.STOPPED
    assert compiling.alive() == []


def test_a_stop_before_anything_started_is_not_lost(pod: MakePod) -> None:
    early = pod({"*": FOREVER}).start()
    assert early.process is not None
    status = Path(f"/proc/{early.process.pid}/status")
    blocked = 1 << (signal.SIGTERM - 1)
    early.until(lambda: bool(int(status.read_text().partition("SigBlk:")[2].split()[0], 16) & blocked))

    early.process.terminate()
    assert early.wait() == ExitCode.STOPPED
    assert early.report.failure is None


def test_the_pod_with_the_cause_ends_before_its_victim(pod: MakePod) -> None:
    hold = {"CTJ_PEER_LOST_HOLD_SECONDS": "4"}
    plan = {
        "0": [["train", 5], ["mark", "PEER_LOST", "Connection closed by peer"]],
        "1": [["train", 5], ["mark", "DATA_OR_STORAGE", "data/x.bin is gone"]],
    }
    both = {"nodes": 2, "processes": 1, "port": free_port(), "environment": hold}
    victim = pod(plan, name="node-0", node=0, **both).start()
    culprit = pod(plan, name="node-1", node=1, **both).start()

    assert culprit.wait() == ExitCode.DATA_OR_STORAGE
    assert victim.process is not None
    assert victim.process.poll() is None
    assert victim.wait() == ExitCode.PEER_LOST
    causes = [made.report.failure for made in (culprit, victim)]
    assert [cause.reason for cause in causes if cause] == ["DataOrStorage", "PeerLost"]


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({names.ENV_ATTEMPT: ""}, ExitCode.CONFIGURATION, "CTJ_ATTEMPT is not set"),
        ({names.ENV_ATTEMPT: "{"}, ExitCode.CONFIGURATION, "no attempt message"),
        ({names.ENV_ATTEMPT: '{"version": 99}'}, ExitCode.CONFIGURATION, "version 99"),
        ({names.ENV_NODE_RANK: "1"}, ExitCode.CONFIGURATION, "below stage.nodes = 1"),
        ({names.ENV_GRACE_SECONDS: "soon"}, ExitCode.CONFIGURATION, "CTJ_GRACE_SECONDS is 'soon', expected a number"),
        ({names.ENV_RUN_DIR: "/proc/nowhere"}, ExitCode.DATA_OR_STORAGE, "/proc/nowhere cannot be written"),
    ],
)
def test_a_wrong_environment_ends_with_one_line(
    pod: MakePod, changes: dict[str, str], code: ExitCode, says: str
) -> None:
    refused = pod({}, environment=changes).start()

    assert refused.wait() == code
    [line] = refused.output.splitlines()
    assert says in line
    failure = refused.report.failure
    assert failure is not None
    assert says in failure.message
