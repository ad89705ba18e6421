"""What a person sees of a job at one moment, as values: `live`, `lines` and `explain` only decide how it looks."""

from dataclasses import dataclass

from ctj_api.attempt import Mode
from ctj_api.spec import Spec, Stage
from ctj_api.status import Phase, StagePhase, StageStatus
from ctj_operator.local.runner import Snapshot


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """One step of the ladder."""

    name: str
    strategy: str
    processes: int
    phase: StagePhase
    done: int
    total: int
    mode: Mode | None
    loss: float | None
    message: str


@dataclass(frozen=True, kw_only=True)
class View:
    """The job at one moment."""

    name: str
    phase: Phase
    stage: str
    attempt: int
    stages: tuple[StageRow, ...]
    step: int
    steps: int
    activity: str
    """What the trainer does now: Starting, Compiling, Training, ...; empty when no attempt runs."""
    mode: Mode | None
    loss: float | None
    grad_norm: float | None
    samples_per_second: float | None
    graphs: int
    recompiles: int
    compile_seconds: float
    memory_used_bytes: int | None
    memory_limit_bytes: int | None
    remaining_seconds: float | None
    silent_seconds: float | None
    """Since the trainer last said anything."""


def build_view(snapshot: Snapshot) -> View:
    """Put spec, status and the running attempt's progress into one picture."""
    spec = Spec.from_document(snapshot.job.spec)
    status, progress = snapshot.status, snapshot.progress
    step = max(status.step, progress.step if progress else 0)
    pace = progress.step_seconds if progress else None
    return View(
        name=snapshot.job.identity.name,
        phase=status.phase,
        stage=status.stage,
        attempt=status.attempt,
        stages=_rows(spec, snapshot, step),
        step=step,
        steps=spec.training.steps,
        activity=progress.phase if progress else ("Starting" if status.current else ""),
        mode=progress.mode if progress else status.mode,
        loss=progress.loss if progress else None,
        grad_norm=progress.grad_norm if progress else None,
        samples_per_second=spec.training.global_batch_size / pace if pace else None,
        graphs=progress.graphs if progress else 0,
        recompiles=progress.recompiles if progress else 0,
        compile_seconds=progress.compile_seconds if progress else 0.0,
        memory_used_bytes=progress.memory_used_bytes if progress else None,
        memory_limit_bytes=progress.memory_limit_bytes if progress else None,
        remaining_seconds=(spec.training.steps - step) * pace if pace else None,
        silent_seconds=snapshot.now - progress.updated_at if progress else None,
    )


def windows(spec: Spec) -> list[tuple[int, int]]:
    """Return (start, end] of each stage."""
    bounds, start = [], 0
    for stage in spec.ladder:
        end = min(spec.training.steps, start + stage.steps) if stage.steps else spec.training.steps
        bounds.append((start, end))
        start = end
    return bounds


def _rows(spec: Spec, snapshot: Snapshot, step: int) -> tuple[StageRow, ...]:
    known = {stage.name: stage for stage in snapshot.status.ladder}
    return tuple(
        _row(stage, known.get(stage.name, StageStatus(name=stage.name)), bounds, snapshot, step)
        for stage, bounds in zip(spec.ladder, windows(spec), strict=True)
    )


def _row(stage: Stage, status: StageStatus, bounds: tuple[int, int], snapshot: Snapshot, step: int) -> StageRow:
    start, end = bounds
    progress = snapshot.progress
    is_current = snapshot.status.current is not None and snapshot.status.current.stage == stage.name
    if status.phase is StagePhase.PASSED:
        done = end - start
    elif is_current:
        done = max(0, min(step, end) - start)
    else:
        done = 0
    return StageRow(
        name=stage.name,
        strategy=stage.strategy,
        processes=stage.world_size,
        phase=status.phase,
        done=done,
        total=end - start,
        mode=progress.mode if is_current and progress else status.mode,
        loss=progress.loss if is_current and progress else None,
        message=status.message,
    )
