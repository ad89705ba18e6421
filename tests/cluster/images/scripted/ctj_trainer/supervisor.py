"""What a pod of the image test/scripted does: the trainer's side of the contract in milliseconds, without training.

For tests of the operator's own promises (budgets, suspend, time to live), where what is trained does not matter. The
job's `recipe.config` says how it behaves: {stepSeconds: 0.05, exits: {"<attempt>": <code>, "default": <code>}}; an exit
comes before the first step.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ctj_api import names
from ctj_api.attempt import Attempt, Mode
from ctj_api.control import Control, StopControl
from ctj_api.exit_codes import ExitCode
from ctj_api.report import CheckpointRef, CompileVerdict, Report
from ctj_api.spec import Measurement

GOOD = dict.fromkeys(Measurement, 0.0) | {Measurement.THROUGHPUT_RATIO: 1.0}


def main() -> int:
    attempt = Attempt.model_validate_json(os.environ[names.ENV_ATTEMPT])
    root = Path(os.environ[names.ENV_CHECKPOINT_ROOT])
    root.mkdir(parents=True, exist_ok=True)
    behaviour: dict[str, Any] = attempt.recipe.config
    exits = behaviour.get("exits", {})
    code = exits.get(str(attempt.attempt), exits.get("default"))
    start = newest_step(root, attempt)
    if code is not None:
        return end(root, attempt, start=start, step=start, code=code)
    told_to_stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told_to_stop.append(number))
    for step in range(start + 1, attempt.window.end_step + 1):
        time.sleep(float(behaviour.get("stepSeconds", 0.05)))
        save(root, attempt.attempt, step)
        if told_to_stop or stop_is_asked():
            return end(root, attempt, start=start, step=step, code=ExitCode.STOPPED)
    return end(root, attempt, start=start, step=attempt.window.end_step, code=ExitCode.DONE)


def newest_step(root: Path, attempt: Attempt) -> int:
    """Return the newest step that the lineage allows to continue from."""
    found = [0]
    for entry in attempt.lineage:
        steps = (
            int(path.name.removeprefix("step-")) for path in (root / names.attempt_folder(entry.attempt)).glob("*")
        )
        found += [step for step in steps if step <= entry.max_step]
    return max(found)


def save(root: Path, attempt: int, step: int) -> None:
    if os.environ[names.ENV_NODE_RANK] == "0":
        (root / names.attempt_folder(attempt) / names.step_folder(step)).mkdir(parents=True)


def stop_is_asked() -> bool:
    text = Path(os.environ[names.ENV_CONTROL_FILE]).read_text()
    return bool(text) and Control.model_validate_json(text).stop is StopControl.CHECKPOINT


def end(root: Path, attempt: Attempt, *, start: int, step: int, code: int) -> int:
    report = Report(
        attempt=attempt.attempt,
        stage=attempt.stage.name,
        exit_code=code,
        mode=attempt.mode,
        start_step=start,
        step=step,
        checkpoint=CheckpointRef(attempt=attempt.attempt, step=step) if step > start else None,
        measurements=GOOD if code == ExitCode.DONE else {},
        compile=CompileVerdict(mode=attempt.mode, reason="scripted") if attempt.mode is Mode.COMPILED else None,
    )
    Path(os.environ[names.ENV_TERMINATION_FILE]).write_text(report.model_dump_json(by_alias=True, exclude_none=True))
    if code == ExitCode.KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    return code


if __name__ == "__main__":
    sys.exit(main())
