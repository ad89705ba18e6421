"""What a running attempt tells: step, speed, running time, GPU time; and how seldom that is worth a write."""

from ctj_api.report import Progress
from ctj_api.spec import Measurement
from ctj_api.status import Condition, ConditionStatus, ConditionType, Status
from ctj_operator.core import ladder
from ctj_operator.core.observed import Child
from ctj_operator.core.situation import Situation, has_started
from ctj_operator.core.times import moment, stamp

WRITE_SECONDS = 30.0
"""Least time between two status writes that only report progress; `ctj run` reads the live figures elsewhere."""
_STEPPED = frozenset({"Evaluating", "Saving", "Exporting", "Done"})


def follow(situation: Situation, child: Child) -> Situation:
    """Take over what the running child shows."""
    current = situation.current
    if has_started(child) and not current.child_seen:
        situation = situation.change_current(child_seen=True)
    if situation.is_running and current.running_since is None:
        since = stamp(situation.now)
        situation = situation.change_current(running_since=since, accounted_at=since)
        situation = situation.change(started_at=situation.status.started_at or since)
        situation = situation.tell("AttemptRunning", f"attempt {current.attempt}: pods run")
    if not situation.is_running and current.running_since is not None:
        situation = account(situation, until=situation.now).change_current(running_since=None, accounted_at=None)
    return _take_progress(account(situation, until=situation.now), child)


def _take_progress(situation: Situation, child: Child) -> Situation:
    progress = own_progress(child)
    if progress is None:
        return situation
    current = situation.current
    if progress.loss is not None or progress.phase in _STEPPED:
        situation = situation.change_current(first_step_seen=True)
        situation = situation.change_stage(current.stage, mode=progress.mode).change(mode=progress.mode)
    if progress.checkpoint_step is not None:
        newest = max(progress.checkpoint_step, current.checkpoint_step or 0)
        situation = situation.change_current(checkpoint_step=newest)
    return _at_step(situation, told_step(situation.status, progress), seconds_per_step=progress.step_seconds)


def told_step(status: Status, progress: Progress) -> int:
    """Return the step of a running attempt. One that still loads says 0, and stands where it will go on from."""
    current = status.current
    stage = next((one for one in status.ladder if current is not None and one.name == current.stage), None)
    return progress.step or (0 if stage is None else ladder.resume_step(stage))


def own_progress(child: Child) -> Progress | None:
    """Return the child's progress unless it is another attempt's."""
    progress = child.progress
    return progress if progress is not None and progress.attempt == child.attempt else None


def _at_step(situation: Situation, step: int, *, seconds_per_step: float | None) -> Situation:
    steps = situation.spec.training.steps
    step = min(step, steps)
    remaining = None if seconds_per_step is None else round((steps - step) * seconds_per_step)
    return situation.change(step=step, progress_percentage=100 * step // steps, estimated_remaining_seconds=remaining)


def reached(situation: Situation, step: int) -> Situation:
    """Note the step an ended attempt came to, or the next one goes on from; nothing is left to estimate."""
    return _at_step(situation, step, seconds_per_step=None)


def account(situation: Situation, *, until: float) -> Situation:
    """Add the running time since it was last added."""
    current = situation.status.current
    if current is None or current.accounted_at is None:
        return situation
    elapsed = max(0.0, until - moment(current.accounted_at))
    stage = ladder.stage_of(situation.spec, current.stage)
    gpus = stage.nodes * (stage.gpus_per_node or 0)
    status = situation.status
    situation = situation.change(
        active_seconds=status.active_seconds + elapsed, gpu_seconds=status.gpu_seconds + elapsed * gpus
    )
    return situation.change_current(accounted_at=stamp(max(until, moment(current.accounted_at))))


def seconds_per_step(status: Status, stage: str) -> float | None:
    """Return the measured time of one step in a finished stage."""
    measured = next((one.measurements for one in status.ladder if one.name == stage), {})
    figure = measured.get(Measurement.STEP_TIME_P50_SECONDS)
    return None if figure is None else float(figure)


def settled(old: Status, new: Status, *, now: float) -> Status:
    """Return what to store: `old` itself where only progress moved and was written less than 30 s ago."""
    if new == old:
        return old
    if _without_progress(new) != _without_progress(old):
        return new.model_copy(update={"progress_at": stamp(now)})
    if old.progress_at is not None and now - moment(old.progress_at) < WRITE_SECONDS:
        return old
    return new.model_copy(update={"progress_at": stamp(now)})


def _without_progress(status: Status) -> Status:
    """Blank what moves by itself while nothing happens: figures, and what the trainer is just doing."""
    current = status.current
    if current is not None:
        current = current.model_copy(update={"accounted_at": None, "checkpoint_step": None})
    return status.model_copy(
        update={
            "current": current,
            "conditions": [_without_doing(one) for one in status.conditions],
            "step": 0,
            "progress_percentage": 0,
            "estimated_remaining_seconds": None,
            "active_seconds": 0.0,
            "gpu_seconds": 0.0,
            "progress_at": None,
        }
    )


def _without_doing(condition: Condition) -> Condition:
    """Blank what may wait: what the trainer is just doing, and that a child asked for was seen with pending pods."""
    kind, status = condition.type, condition.status
    blank = {"reason": "", "message": ""}
    if kind is ConditionType.PROGRESSING or (kind is ConditionType.RUNNING and status is not ConditionStatus.TRUE):
        return condition.model_copy(update=blank)
    if kind is ConditionType.ADMITTED and status is not ConditionStatus.FALSE:
        either = {"status": ConditionStatus.TRUE, "last_transition_time": ""}
        return condition.model_copy(update={**blank, **either})
    return condition
