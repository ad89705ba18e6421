"""Why a running attempt must stop, how it is asked to, and what follows once it has."""

from enum import StrEnum

from ctj_api.status import StagePhase, StageStatus
from ctj_operator.core import remedies
from ctj_operator.core.observed import Child
from ctj_operator.core.progress import own_progress
from ctj_operator.core.situation import Situation, has_started
from ctj_operator.core.starting import attempt_hash
from ctj_operator.core.times import moment, spoken, stamp

PATIENCE_SECONDS = 300.0
"""How long pods may take to save a checkpoint after they were asked to stop; then the child is deleted, and its pods
still have their grace period."""


class StopReason(StrEnum):
    """Why an attempt is being stopped; stored in `current.stopping`."""

    DEADLINE = "DeadlineExceeded"
    SUSPENDED = "Suspended"
    ROLLBACK = "RollbackRequested"
    RETRY_COMPILE = "RetryCompile"
    SPEC_CHANGED = "SpecChanged"


def ask_to_stop(situation: Situation, why: StopReason, message: str) -> Situation:
    """Ask every pod to save a checkpoint and end."""
    current = situation.current
    situation = situation.change_current(
        stopping=why.value,
        stopping_since=stamp(situation.now),
        control_sequence=current.control_sequence + 1,
    )
    return situation.tell("Stopping", f"attempt {current.attempt} saves a checkpoint and ends: {message}")


def stop_if_needed(situation: Situation) -> Situation:
    """Stop the attempt where its time is over, the job is paused, or the spec its pods were built from changed."""
    if situation.current.stopping:
        return situation
    limit = situation.spec.active_deadline_seconds
    if limit is not None and situation.status.active_seconds >= limit:
        return ask_to_stop(situation, StopReason.DEADLINE, f"spec.activeDeadlineSeconds = {limit} is used up")
    if situation.spec.suspend:
        return ask_to_stop(situation, StopReason.SUSPENDED, "spec.suspend is true")
    wanted = attempt_hash(situation.spec, situation.status, situation.current.stage)
    if wanted != situation.current.spec_hash:
        return ask_to_stop(situation, StopReason.SPEC_CHANGED, "the spec changed; a new attempt follows")
    return situation


def insist(situation: Situation, child: Child) -> Situation:
    """Delete a stopping child that has nothing to save, or does not obey."""
    current = situation.current
    if not current.stopping or child.deleting:
        return situation
    if not has_started(child):
        return situation.remove(child)
    assert current.stopping_since is not None
    waited = situation.now - moment(current.stopping_since)
    if waited < PATIENCE_SECONDS:
        return situation
    message = f"attempt {current.attempt} did not end {spoken(waited)} after it was asked to; its child is deleted"
    return situation.remove(child).warn("StopTimeout", message)


def is_late(situation: Situation, child: Child | None) -> bool:
    """Return whether the attempt waited too long for its first step.

    Pods that run and whose progress cannot be read are taken to train: missing data never condemns.
    """
    limit = situation.spec.pending_deadline_seconds
    if limit is None or situation.current.first_step_seen:
        return False
    if child is not None and situation.is_running and own_progress(child) is None:
        return False
    return situation.now - moment(situation.current.recorded_at) >= limit


def after_stop(situation: Situation, stage: StageStatus, *, why: StopReason) -> Situation:
    """Decide what follows an attempt that was asked to stop, however it ended."""
    if why is StopReason.DEADLINE:
        limit = situation.spec.active_deadline_seconds
        return situation.fail(
            "DeadlineExceeded", f"spec.activeDeadlineSeconds = {limit} is used up at step {situation.status.step}"
        )
    if why is StopReason.ROLLBACK:
        return remedies.roll_back(situation, stage, reason="Requested", evidence="asked for by a person")
    # Paused, or to be replaced: the stage continues from its newest checkpoint, uncounted.
    situation = situation.change_stage(stage.name, phase=StagePhase.PENDING)
    if why is StopReason.SUSPENDED:
        newest = f"the checkpoint of step {stage.checkpoint.step}" if stage.checkpoint is not None else "its start"
        return situation.tell("Suspended", f"no pod is left; stage {stage.name} will go on from {newest}")
    return situation
