"""Where else do the figures of each step go? TensorBoard, Weights & Biases or MLflow, through Accelerate's classes.

Only rank 0 writes, all attempts of a job continue one run, and a tracker that fails costs a notice, never the training.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from ctj_api.attempt import Attempt
from ctj_api.names import TRACKERS_FOLDER
from ctj_api.spec import Tracker
from ctj_trainer.records import StepRecord

PACKAGES = {Tracker.TENSORBOARD: "tensorboard", Tracker.WANDB: "wandb", Tracker.MLFLOW: "mlflow"}
_FIGURES = ("loss", "grad_norm", "learning_rate", "seconds", "tokens", "loss_scale", "evaluation_loss")


class Run(Protocol):
    """What is used of accelerate.tracking.GeneralTracker."""

    tracker: Any

    def start(self) -> None:
        """Open or continue the run."""

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        """Write the figures of one step."""

    def finish(self) -> None:
        """Close the run."""


class Trackers:
    """The open runs of one attempt; none on other ranks, and none where none were asked for."""

    def __init__(self, runs: dict[Tracker, Run], notice: Callable[[str], None]) -> None:
        self._runs = runs
        self._notice = notice

    def log(self, record: StepRecord) -> None:
        """Write one step."""
        figures = {name: getattr(record, name) for name in _FIGURES}
        values = {f"train/{name}": float(value) for name, value in figures.items() if value is not None}
        self._each(lambda run: run.log(values, step=record.step))

    def finish(self) -> None:
        """Close all runs."""
        self._each(lambda run: run.finish())

    def _each(self, act: Callable[[Run], None]) -> None:
        for name, run in list(self._runs.items()):
            try:
                act(run)
            except Exception as error:  # a service of somebody else's must not end the training
                del self._runs[name]
                self._notice(_lost(name, error))


@contextmanager
def tracking(
    attempt: Attempt, *, root: Path, is_first_rank: bool, resumed_at: int, notice: Callable[[str], None]
) -> Iterator[Trackers]:
    """Open the runs that `spec.training.trackers` asks for."""
    runs: dict[Tracker, Run] = {}
    for name in attempt.training.trackers if is_first_rank else ():
        try:
            runs[name] = _started(name, attempt, root / TRACKERS_FOLDER, resumed_at)
        except Exception as error:
            notice(_lost(name, error))
    trackers = Trackers(runs, notice)
    try:
        yield trackers
    finally:
        trackers.finish()


def _started(name: Tracker, attempt: Attempt, folder: Path, resumed_at: int) -> Run:
    from accelerate import tracking as accelerate_tracking

    # Accelerate's own logger and its main-process test want its process state, which would join the ranks once more.
    accelerate_tracking.logger = logging.getLogger("accelerate.tracking")
    folder.mkdir(parents=True, exist_ok=True)
    run: Any = _BUILD[name](accelerate_tracking, attempt, folder, resumed_at)
    run.main_process_only = False
    run.start()
    if name is Tracker.MLFLOW:
        _mlflow_run(folder).write_text(run.tracker.info.run_id)
    return run  # type: ignore[no-any-return]  # no stubs


def _tensorboard(classes: Any, attempt: Attempt, folder: Path, resumed_at: int) -> Any:
    # Steps after the checkpoint are made again: what an earlier attempt wrote of them is hidden.
    return classes.TensorBoardTracker(attempt.job.name, folder / "tensorboard", purge_step=resumed_at + 1)


def _wandb(classes: Any, attempt: Attempt, folder: Path, resumed_at: int) -> Any:
    del resumed_at
    job = attempt.job
    return classes.WandBTracker(job.namespace, id=job.uid, name=job.name, resume="allow", dir=str(folder))


def _mlflow(classes: Any, attempt: Attempt, folder: Path, resumed_at: int) -> Any:
    del resumed_at
    known = _mlflow_run(folder)
    run_id = known.read_text() if known.exists() else None
    return classes.MLflowTracker(attempt.job.namespace, run_id=run_id, run_name=attempt.job.name)


_BUILD: dict[Tracker, Callable[[Any, Attempt, Path, int], Any]] = {
    Tracker.TENSORBOARD: _tensorboard,
    Tracker.WANDB: _wandb,
    Tracker.MLFLOW: _mlflow,
}


def _mlflow_run(folder: Path) -> Path:
    return folder / "mlflow-run-id"


def _lost(name: Tracker, error: Exception) -> str:
    return f"tracker {name} writes nothing any more ({type(error).__name__}: {str(error)[:200]}); training goes on"
