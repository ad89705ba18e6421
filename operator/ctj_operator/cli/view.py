"""What a person sees of a job at one moment, as values: `live`, `lines` and `explain` only decide how it looks."""

from dataclasses import dataclass

from ctj_api.attempt import Mode
from ctj_api.spec import Spec, Stage
from ctj_api.status import Phase, StagePhase, StageStatus
from ctj_operator.core.ladder import plan
from ctj_operator.core.progress import told_step
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
    remaining_seconds: float | None
    silent_seconds: float | None
    """Since the trainer last said anything."""


def build_view(snapshot: Snapshot) -> View:
    """Put spec, status and the running attempt's progress into one picture.

    Raises:
        Refusal: the stored spec was broken by hand.
    """
    spec = snapshot.job.parsed_spec()
    status, progress = snapshot.status, snapshot.progress
    step = told_step(status, progress) if progress else status.step
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
        remaining_seconds=(spec.training.steps - step) * pace if pace else None,
        silent_seconds=snapshot.now - progress.updated_at if progress else None,
    )


def _rows(spec: Spec, snapshot: Snapshot, step: int) -> tuple[StageRow, ...]:
    known = {stage.name: stage for stage in snapshot.status.ladder}
    ends = [window.end for window in plan(spec)]
    return tuple(
        _row(stage, known.get(stage.name, StageStatus(name=stage.name)), (start, end), snapshot, step)
        for stage, start, end in zip(spec.ladder, [0, *ends[:-1]], ends, strict=True)
    )


def _row(stage: Stage, status: StageStatus, planned: tuple[int, int], snapshot: Snapshot, step: int) -> StageRow:
    """Steps the stage repeats of the one before are not its own; a stage rolled back to may have got more to do."""
    start, end = planned[0], max(planned[1], status.end_step)
    current = snapshot.status.current
    progress = snapshot.progress if current is not None and current.stage == stage.name else None
    is_here = snapshot.status.stage == stage.name
    reached = end if status.phase is StagePhase.PASSED else min(step, end) if is_here else start
    return StageRow(
        name=stage.name,
        strategy=stage.strategy,
        processes=stage.world_size,
        phase=status.phase,
        done=max(0, reached - start),
        total=end - start,
        mode=progress.mode if progress else status.mode,
        loss=progress.loss if progress else None,
        message=status.message,
    )
