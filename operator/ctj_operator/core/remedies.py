"""What is done when a stage's evidence is bad: eager, back to the last good stage, hold, fail. Each has a budget.

Every remedy leaves one entry with its evidence in `status.remedies` and one event. `spec` is never rewritten.
"""

from ctj_api.attempt import Mode
from ctj_api.spec import HoldTimeout, Spec
from ctj_api.status import HoldState, StagePhase, StageStatus, Status
from ctj_operator.core import ladder
from ctj_operator.core.progress import seconds_per_step
from ctj_operator.core.situation import Situation
from ctj_operator.core.times import seconds, spoken, stamp

MOST_REPEATED_SECONDS = 3600.0
"""A rollback may throw away at most this much of the last stage's own training; beyond it a person decides."""


def fall_back(situation: Situation, stage: StageStatus, *, reason: str, evidence: str) -> Situation:
    """Run the stage again from its start, eager; the caller has checked the budget."""
    status = situation.status
    situation = situation.change(fallbacks_used=status.fallbacks_used + 1).remedy(
        "Fallback", reason=reason, evidence=evidence
    )
    situation = situation.change_stage(
        stage.name,
        phase=StagePhase.PENDING,
        eager_because=f"{reason}: {evidence}"[:256],
        lineage=ladder.base_lineage(stage),
        checkpoint=None,
        message=f"runs again in eager: {evidence}"[:1024],
    )
    situation = situation.change(restarts=status.restarts.model_copy(update={"since_step": stage.start_step}))
    budget = f"{status.fallbacks_used + 1} of {situation.spec.remedies.max_fallbacks} fallbacks"
    return situation.warn(
        "Fallback", f"stage {stage.name} runs again in eager from step {stage.start_step}: {evidence} ({budget})"
    )


def may_fall_back(situation: Situation, *, compiled: bool) -> bool:
    """Return whether going eager is left as a remedy."""
    return compiled and situation.status.fallbacks_used < situation.spec.remedies.max_fallbacks


def roll_back_or_hold(situation: Situation, stage: StageStatus, *, reason: str, evidence: str) -> Situation:
    """Roll back where there is something to go back to and it is worth it; else a person decides."""
    obstacle = nothing_to_go_back_to(situation.spec, situation.status, stage.name) or _too_dear(situation, stage)
    if obstacle:
        return hold(situation, stage, reason=reason, message=f"{evidence}; no rollback: {obstacle}")
    return roll_back(situation, stage, reason=reason, evidence=evidence)


def roll_back(situation: Situation, stage: StageStatus, *, reason: str, evidence: str) -> Situation:
    """Finish the job in the last good stage, from its last checkpoint; the caller has seen that there is one."""
    assert not nothing_to_go_back_to(situation.spec, situation.status, stage.name)
    stable = situation.status.stable
    assert stable is not None
    good = situation.stage(stable.stage)
    status = situation.status
    situation = situation.change(rollbacks_used=status.rollbacks_used + 1).remedy(
        "Rollback", reason=reason, evidence=evidence
    )
    situation = _close_stages_above(situation, good.name, failed=stage.name, why=evidence)
    step = stable.checkpoint.step
    end = situation.spec.training.steps
    situation = situation.change_stage(
        good.name,
        phase=StagePhase.PENDING,
        start_step=step,
        end_step=end,
        finished_at=None,
        eager_because=good.eager_because or ("" if stable.mode is Mode.COMPILED else "the stage was verified in eager"),
        message=f"continues after a rollback from {stage.name}: {evidence}"[:1024],
    )
    situation = situation.change(
        stage=good.name,
        hold=None,
        restarts=status.restarts.model_copy(update={"failures": 0, "disruptions": 0, "since_step": step}),
    )
    return situation.warn(
        "Rollback", f"stage {stage.name} is given up, {good.name} trains steps {step} to {end}: {evidence}"
    )


def _close_stages_above(situation: Situation, good: str, *, failed: str, why: str) -> Situation:
    names = [stage.name for stage in situation.status.ladder]
    for name in names[names.index(good) + 1 :]:
        if name == failed:
            situation = situation.change_stage(name, phase=StagePhase.FAILED, message=why[:1024])
        elif situation.stage(name).phase not in (StagePhase.FAILED, StagePhase.SKIPPED):
            situation = situation.change_stage(
                name, phase=StagePhase.SKIPPED, message=f"not reached: rolled back from {failed} to {good}"
            )
    return situation


def nothing_to_go_back_to(spec: Spec, status: Status, stage: str) -> str:
    """Return why no rollback from `stage` is possible, or nothing."""
    stable = status.stable
    if stable is None:
        return "no stage has passed yet"
    if stable.stage == stage:
        return f"{stage} is the last good stage itself"
    if stable.checkpoint.step >= spec.training.steps:
        return "all steps are done"
    return ""


def _too_dear(situation: Situation, stage: StageStatus) -> str:
    status, spec = situation.status, situation.spec
    if status.rollbacks_used >= spec.remedies.max_rollbacks:
        return f"{status.rollbacks_used} of {spec.remedies.max_rollbacks} rollbacks are used"
    assert status.stable is not None
    lost = (status.step - status.stable.checkpoint.step) * (seconds_per_step(status, stage.name) or 0.0)
    if stage.end_step >= spec.training.steps and lost > MOST_REPEATED_SECONDS:
        return f"it would repeat {spoken(lost)} of training"
    needed = (spec.training.steps - status.stable.checkpoint.step) * (
        seconds_per_step(status, status.stable.stage) or 0.0
    )
    if spec.active_deadline_seconds is not None and status.active_seconds + needed > spec.active_deadline_seconds:
        return f"finishing in {status.stable.stage} takes about {spoken(needed)}, longer than the deadline leaves"
    return ""


def hold(situation: Situation, stage: StageStatus, *, reason: str, message: str) -> Situation:
    """Wait for a person, without pods, until the hold's deadline."""
    timeout = seconds(situation.spec.remedies.hold.timeout)
    state = HoldState(
        since=stamp(situation.now),
        deadline=stamp(situation.now + timeout),
        reason=reason,
        message=message[:1024],
    )
    situation = situation.change(hold=state).remedy("Hold", reason=reason, evidence=message)
    return situation.warn("Held", f"stage {stage.name} waits for approval, at most {spoken(timeout)}: {message}")


def hold_timed_out(situation: Situation, stage: StageStatus) -> Situation:
    """Do what the spec says about a hold nobody answered."""
    held = situation.status.hold
    assert held is not None
    message = f"nobody approved stage {stage.name} in {situation.spec.remedies.hold.timeout}: {held.message}"
    if situation.spec.remedies.hold.on_timeout is HoldTimeout.FAIL:
        return situation.fail("HoldTimeout", message)
    obstacle = nothing_to_go_back_to(situation.spec, situation.status, stage.name)
    if obstacle:
        return situation.fail("HoldTimeout", f"{message}; no rollback: {obstacle}")
    return roll_back(situation, stage, reason="HoldTimeout", evidence=message)
