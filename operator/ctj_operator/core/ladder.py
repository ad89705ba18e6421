"""Which steps each stage trains, what it starts from, and which stage comes next.

Step s is the state after s optimizer steps. A stage saves at its end and K steps before; the next one starts from the
earlier checkpoint, repeats those K steps on the same samples and goes on, so that both have measured them.
"""

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ctj_api.attempt import LineageEntry, Replay, StageWindow
from ctj_api.spec import Spec, Stage, Strategy
from ctj_api.status import StagePhase, StageStatus, Status

MAX_LINEAGE = 64
_OVER = (StagePhase.PASSED, StagePhase.FAILED, StagePhase.SKIPPED)


class SpecProblem(ValueError):
    """The stored spec cannot be run; the message names every problem."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Planned steps of a stage: (start, end], of which the last `replay` are repeated by the next stage."""

    start: int
    end: int
    replay: int


def read_spec(document: dict[str, Any]) -> Spec:
    """Return a stored spec as values; admission has checked it, but somebody may have broken it since.

    Raises:
        SpecProblem: it cannot be run.
    """
    try:
        spec = Spec.from_document(document)
    except ValidationError as error:
        raise SpecProblem("; ".join(_described(problem) for problem in error.errors())) from None
    _check(spec)
    return spec


def _described(problem: Any) -> str:
    place = ".".join(["spec", *(str(part) for part in problem["loc"])])
    return f"{place} is {problem['input']!r:.80}: {problem['msg']}"


def plan(spec: Spec) -> tuple[Window, ...]:
    """Lay the stages out over the job's steps.

    Raises:
        SpecProblem: the steps do not add up, or names repeat.
    """
    _check(spec)
    windows: list[Window] = []
    for stage in spec.ladder:
        before = windows[-1] if windows else Window(start=0, end=0, replay=0)
        last = stage is spec.ladder[-1]
        end = spec.training.steps if last else before.end + (stage.steps or 0)
        windows.append(Window(start=before.end - before.replay, end=end, replay=0 if last else _replay_steps(stage)))
    return tuple(windows)


def _replay_steps(stage: Stage) -> int:
    """K: as asked, or min(5, steps / 4); at least one step is left for the stage itself."""
    steps = stage.steps or 1
    wanted = min(5, steps // 4) if stage.replay_steps is None else stage.replay_steps
    return min(wanted, steps - 1)


def _check(spec: Spec) -> None:
    """Check again what the windows' arithmetic rests on. Admission has, by rules in CEL, unless the object is older
    than they are or was broken by hand; running those here would cost each pass more than all it decides.
    """
    problems = []
    canaries = spec.ladder[:-1]
    for index, stage in enumerate(canaries):
        if stage.steps is None:
            problems.append(f"spec.ladder[{index}].steps is absent; every stage but the last needs it")
    used = sum(stage.steps or 0 for stage in canaries)
    if used >= spec.training.steps:
        problems.append(
            f"spec.ladder: the canary stages take {used} steps of spec.training.steps = {spec.training.steps};"
            " leave at least one for the last stage"
        )
    if len({stage.name for stage in spec.ladder}) < len(spec.ladder):
        problems.append("spec.ladder: two stages have the same name")
    for index, stage in enumerate(spec.ladder):
        if spec.training.global_batch_size % stage.world_size:
            problems.append(
                f"spec.ladder[{index}] has {stage.world_size} processes, which do not divide"
                f" spec.training.globalBatchSize = {spec.training.global_batch_size}"
            )
    if problems:
        raise SpecProblem("; ".join(problems))


def first_statuses(spec: Spec) -> list[StageStatus]:
    """Return the whole ladder as it looks before anything ran."""
    windows = zip(spec.ladder, plan(spec), strict=True)
    return [StageStatus(name=stage.name, start_step=w.start, end_step=w.end) for stage, w in windows]


def stage_of(spec: Spec, name: str) -> Stage:
    """Return the spec of one stage."""
    return next(stage for stage in spec.ladder if stage.name == name)


def active_stage(status: Status) -> StageStatus | None:
    """Return the stage that is held, runs, or runs next: the first that is neither passed, failed nor skipped."""
    if status.hold is not None:
        return next(stage for stage in status.ladder if stage.name == status.stage)
    return next((stage for stage in status.ladder if stage.phase not in _OVER), None)


def resume_step(stage: StageStatus) -> int:
    """Return the step the stage's next attempt goes on from, as far as is known."""
    return stage.start_step if stage.checkpoint is None else max(stage.checkpoint.step, stage.start_step)


def last_passed(status: Status, *, before: str) -> StageStatus | None:
    """Return the newest passed stage below stage `before`."""
    passed = None
    for stage in status.ladder:
        if stage.name == before:
            break
        if stage.phase is StagePhase.PASSED:
            passed = stage
    return passed


def planned_end(spec: Spec, status: Status, name: str) -> int:
    """Return where stage `name` ends: as planned, or at the job's end once every stage above is given up."""
    index = _index(spec, name)
    above = status.ladder[index + 1 :]
    if all(stage.phase in (StagePhase.FAILED, StagePhase.SKIPPED) for stage in above):
        return spec.training.steps
    return plan(spec)[index].end


def replay_start(spec: Spec, stage: StageStatus) -> int:
    """Return the step whose checkpoint the stage after `stage` starts from."""
    window = plan(spec)[_index(spec, stage.name)]
    return stage.end_step - window.replay


def entered(spec: Spec, status: Status, name: str) -> StageStatus:
    """Return stage `name` ready for its first attempt: it starts K steps before the end of the last passed stage."""
    stage = next(stage for stage in status.ladder if stage.name == name)
    end = plan(spec)[_index(spec, name)].end
    before = last_passed(status, before=name)
    if before is None:
        return stage.model_copy(update={"start_step": 0, "end_step": end, "lineage": []})
    start = replay_start(spec, before)
    # Entries that end below the start cannot hold the checkpoint the stage starts from.
    inherited = [entry for entry in before.lineage if entry.max_step >= start][-MAX_LINEAGE // 2 :]
    lineage = [entry.model_copy(update={"max_step": start}) for entry in inherited]
    return stage.model_copy(update={"start_step": start, "end_step": end, "lineage": lineage})


def base_lineage(stage: StageStatus) -> list[LineageEntry]:
    """Return the checkpoints the stage itself started from, without those of its own attempts."""
    return [entry for entry in stage.lineage if entry.max_step <= stage.start_step]


def lengthened(stage: StageStatus, *, attempt: int, checkpoint_attempt: int | None) -> list[LineageEntry]:
    """Return the stage's lineage with an ended attempt added.

    It is bounded: the oldest of the stage's own entries go, but never the newest known checkpoint.
    """
    base = base_lineage(stage)
    own = [entry for entry in stage.lineage if entry.max_step > stage.start_step]
    surplus = len(stage.lineage) + 1 - MAX_LINEAGE
    if surplus > 0:
        dropped = [entry for entry in own if entry.attempt != checkpoint_attempt][:surplus]
        own = [entry for entry in own if entry not in dropped]
    return [*base, *own, LineageEntry(attempt=attempt, max_step=stage.end_step)]


def attempt_window(spec: Spec, stage: StageStatus) -> StageWindow:
    """Return the steps one attempt of the stage is told; after a rollback the stage runs to the job's end."""
    is_last = stage.end_step >= spec.training.steps
    before_end = stage.end_step if is_last else replay_start(spec, stage)
    save_at = sorted({step for step in (before_end, stage.end_step) if step > stage.start_step})
    return StageWindow(start_step=stage.start_step, end_step=stage.end_step, save_at=tuple(save_at))


def replay_of(status: Status, stage: StageStatus) -> Replay | None:
    """Return what the stage repeats, or None where there is nothing to compare with."""
    before = last_passed(status, before=stage.name)
    if before is None or before.checkpoint is None or stage.start_step >= before.end_step:
        return None
    return Replay(attempt=before.checkpoint.attempt, from_step=stage.start_step, to_step=before.end_step)


def sharding(stage: Stage) -> int:
    """Return over how many processes parameters are split; more means less memory for each."""
    return stage.world_size if stage.strategy in (Strategy.FSDP, Strategy.ZERO3) else 1


def more_sharded(spec: Spec, name: str) -> Stage | None:
    """Return the next stage above `name` that needs less memory per process."""
    index = _index(spec, name)
    here = sharding(spec.ladder[index])
    return next((stage for stage in spec.ladder[index + 1 :] if sharding(stage) > here), None)


def _index(spec: Spec, name: str) -> int:
    return next(index for index, stage in enumerate(spec.ladder) if stage.name == name)
