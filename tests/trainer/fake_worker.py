"""A worker without a model, started by the real torchrun agent: it does what FAKE_WORKER says, in real processes.

FAKE_WORKER is JSON {rank: [what, ...]}, `*` for every rank. Each step is published as the real loop does it.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from ctj_api.attempt import Mode
from ctj_api.exit_codes import ExitCode
from ctj_api.report import Report
from ctj_trainer import progress
from ctj_trainer.marks import write_mark
from ctj_trainer.metrics import RankMetrics
from ctj_trainer.progress import ProgressWriter
from ctj_trainer.requests import Requests

RUN_DIR = Path(os.environ["CTJ_RUN_DIR"])
RANK = int(os.environ.get("RANK", "0"))
STEP_SECONDS = 0.05


def main() -> int:
    plan = json.loads(os.environ["FAKE_WORKER"])
    print(f"hello from {RANK}", flush=True)
    with ProgressWriter(RUN_DIR, attempt=1, mode=Mode.EAGER) if os.environ["LOCAL_RANK"] == "0" else _Quiet() as pod:
        for what, *argument in plan.get(str(RANK), plan.get("*", [["train", 5]])):
            code = globals()[f"do_{what}"](pod, *argument)
            if code is not None:
                return int(code)
    return int(end(ExitCode.DONE))


class _Quiet:
    def __enter__(self) -> "_Quiet":
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def update(self, **_: object) -> None:
        return None


def end(kind: ExitCode, message: str = "") -> ExitCode:
    write_mark(RUN_DIR, rank=RANK, kind=kind, message=message)
    return kind


def do_train(pod: ProgressWriter, steps: int) -> ExitCode | None:
    """Step until done or asked to stop; a stop saves."""
    control = Path(os.environ["CTJ_CONTROL_FILE"])
    requests = Requests(attempt=1, control_file=control, run_dir=RUN_DIR)
    metrics = RankMetrics(RUN_DIR, rank=RANK)
    pod.update(phase=progress.TRAINING)
    for step in range(1, steps + 1):
        time.sleep(STEP_SECONDS)
        pod.update(step=step, loss=1.0 / step)
        metrics.set("ctj_train_step", step)
        metrics.publish(force=True)
        if requests.now().stop:
            pod.update(checkpoint_step=step)
            return end(ExitCode.STOPPED, requests.now().stop)
    return None


def do_train_and_save(pod: ProgressWriter, seconds: float) -> ExitCode:
    """Step until asked to stop; the save then takes its time."""
    requests = Requests(attempt=1, control_file=Path(os.environ["CTJ_CONTROL_FILE"]), run_dir=RUN_DIR)
    pod.update(phase=progress.TRAINING)
    step = 0
    while not requests.now().stop:
        time.sleep(STEP_SECONDS)
        step += 1
        pod.update(step=step)
    pod.update(phase=progress.SAVING)
    time.sleep(seconds)
    pod.update(checkpoint_step=step)
    return end(ExitCode.STOPPED, requests.now().stop)


def do_report(pod: ProgressWriter, text: str | None = None) -> None:
    whole = Report(attempt=1, stage="only", exit_code=0, step=5, measurements={"finalLoss": 0.5})
    (RUN_DIR / "report.json").write_text(text or whole.model_dump_json(by_alias=True, exclude_none=True))


def do_say(pod: ProgressWriter, text: str, times: int) -> None:
    print("\n".join(f"{text} {number}" for number in range(times)), file=sys.stderr, flush=True)


def do_compile(pod: ProgressWriter, seconds: float) -> None:
    pod.update(phase=progress.COMPILING)
    time.sleep(seconds)


def do_wait(pod: ProgressWriter, seconds: float) -> None:
    time.sleep(seconds)


def do_hang_here(pod: ProgressWriter) -> None:
    pod.update(phase=progress.TRAINING, step=3)
    while True:
        time.sleep(1)


def do_raise(pod: ProgressWriter, text: str) -> None:
    raise ValueError(text)


def do_mark(pod: ProgressWriter, kind: str, message: str) -> ExitCode:
    return end(ExitCode[kind], message)


def do_kill_self(pod: ProgressWriter) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
