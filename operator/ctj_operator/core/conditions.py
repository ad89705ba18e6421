"""What people read: the twelve conditions, derived afresh in every pass, and the phase, derived from them last.

Derived, not steered: nothing here is read back, except that Succeeded and Failed are final.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ctj_api.attempt import Mode
from ctj_api.conditions import REASONS
from ctj_api.spec import CompileScope
from ctj_api.status import Condition, ConditionStatus, ConditionType, Phase, StagePhase, StageStatus, Status
from ctj_api.thresholds import Verdict
from ctj_operator.core import gates
from ctj_operator.core.observed import Child, PodPhase
from ctj_operator.core.progress import own_progress
from ctj_operator.core.situation import Situation
from ctj_operator.core.times import stamp

TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN
_WAITING_IS_NORMAL = frozenset({"", "ContainerCreating", "PodInitializing", "Scheduled"})
_DOING = {
    "Compiling": "Compiling",
    "Probing": "Compiling",
    "Training": "Training",
    "Evaluating": "Training",
} | dict.fromkeys(("Saving", "Exporting", "Done"), "Saving")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One condition without its bookkeeping."""

    status: ConditionStatus
    reason: str
    message: str = ""


def derive(situation: Situation) -> Situation:
    """Set all conditions and the phase."""
    found = {kind: finder(situation) for kind, finder in _FINDERS.items()}
    return _written(situation, found)


def refused(status: Status, *, problems: str, generation: int, now: float) -> Status:
    """Return the status of a job whose spec cannot be run."""
    found = {
        kind: Finding(status=UNKNOWN, reason=reason)
        for kind, reason in (
            (ConditionType.ADMITTED, "NoAttempt"),
            (ConditionType.RUNNING, "NoAttempt"),
            (ConditionType.COMPILED, "NotYetDecided"),
            (ConditionType.GATE_PASSED, "NotEvaluated"),
        )
    }
    found |= {
        kind: Finding(status=FALSE, reason=reason)
        for kind, reason in (
            (ConditionType.DEGRADED, "AsExpected"),
            (ConditionType.HELD, "NotHeld"),
            (ConditionType.SUSPENDED, "NotSuspended"),
            (ConditionType.ROLLED_BACK, "NotRolledBack"),
            (ConditionType.SUCCEEDED, "NotFinished"),
            (ConditionType.FAILED, "NotFailed"),
        )
    }
    # What an earlier, valid spec led to stays.
    found |= {old.type: Finding(status=old.status, reason=old.reason, message=old.message) for old in status.conditions}
    found[ConditionType.ACCEPTED] = Finding(status=FALSE, reason="InvalidSpec", message=problems)
    if status.current is None:
        found[ConditionType.PROGRESSING] = Finding(status=FALSE, reason="InvalidSpec", message=problems)
    found.setdefault(ConditionType.PROGRESSING, Finding(status=FALSE, reason="InvalidSpec"))
    conditions = _conditions(status, found, generation=generation, now=now)
    return status.model_copy(update={"conditions": conditions, "observed_generation": generation})


def is_true(status: Status, kind: ConditionType) -> bool:
    """Return whether a stored condition holds."""
    return any(one.type is kind and one.status is TRUE for one in status.conditions)


def is_finished(status: Status) -> bool:
    """Return whether the job has ended; this is sticky and wins over whatever children say."""
    return is_true(status, ConditionType.SUCCEEDED) or is_true(status, ConditionType.FAILED)


def _written(situation: Situation, found: dict[ConditionType, Finding]) -> Situation:
    generation = situation.observed.generation
    conditions = _conditions(situation.status, found, generation=generation, now=situation.now)
    situation = situation.change(conditions=conditions, observed_generation=generation)
    return situation.change(phase=_phase(situation))


def _conditions(status: Status, found: dict[ConditionType, Finding], *, generation: int, now: float) -> list[Condition]:
    before = {old.type: old for old in status.conditions}
    written = []
    for kind in ConditionType:
        finding, old = found[kind], before.get(kind)
        assert finding.reason in REASONS[kind], f"{kind} has no reason {finding.reason}"
        since = old.last_transition_time if old is not None and old.status is finding.status else stamp(now)
        written.append(
            Condition(
                type=kind,
                status=finding.status,
                reason=finding.reason,
                message=finding.message[:4096],
                last_transition_time=since,
                observed_generation=generation,
            )
        )
    return written


def _phase(situation: Situation) -> Phase:
    """One word for `kubectl get`; the first that fits."""
    status = situation.status
    holds = {one.type for one in status.conditions if one.status is TRUE}
    for kind, phase in (
        (ConditionType.SUCCEEDED, Phase.SUCCEEDED),
        (ConditionType.FAILED, Phase.FAILED),
        (ConditionType.HELD, Phase.HELD),
        (ConditionType.SUSPENDED, Phase.SUSPENDED),
        (ConditionType.RUNNING, Phase.RUNNING),
    ):
        if kind in holds:
            return phase
    if any(one.type is ConditionType.ADMITTED and one.status is FALSE for one in status.conditions):
        return Phase.QUEUED
    return Phase.RESTARTING if _is_again(situation) else Phase.PENDING


def _is_again(situation: Situation) -> bool:
    current = situation.status.current
    return current is not None and len(situation.stage(current.stage).attempts) > 1


def _accepted(_: Situation) -> Finding:
    return Finding(status=TRUE, reason="SpecAccepted")


def _admitted(situation: Situation) -> Finding:
    if situation.status.current is None:
        return Finding(status=UNKNOWN, reason="NoAttempt")
    if situation.child is None:
        return Finding(status=UNKNOWN, reason="NotCreated")
    if situation.child.suspended:
        return Finding(status=FALSE, reason="WaitingForQuota", message=f"Job {situation.child.name} is suspended")
    return Finding(status=TRUE, reason="Admitted")


def _running(situation: Situation) -> Finding:
    child = situation.child
    if situation.end is not None:
        return Finding(status=FALSE, reason="Finished")
    if situation.status.current is None:
        return Finding(status=FALSE, reason="NoAttempt")
    if child is None:
        return Finding(status=FALSE, reason="NotCreated")
    if child.suspended:
        return Finding(status=FALSE, reason="WaitingForQuota")
    if not situation.is_running:
        return Finding(status=FALSE, reason="PodsPending", message=_pods_trouble(child))
    return Finding(
        status=TRUE, reason="PodsRunning", message=f"attempt {child.attempt}, stage {situation.status.stage}"
    )


def _progressing(situation: Situation) -> Finding:
    status, child = situation.status, situation.child
    stopped = _why_not_progressing(situation)
    if stopped is not None:
        return stopped
    if status.current is None or (situation.other_live_children and child is None):
        return Finding(status=TRUE, reason="CleaningUp", message="an earlier attempt is still being removed")
    if status.current.stopping:
        return Finding(status=TRUE, reason="Stopping", message=status.current.stopping)
    progress = own_progress(child) if child is not None else None
    doing = _DOING.get(progress.phase) if progress is not None else None
    if doing is None:
        doing = "Restarting" if _is_again(situation) else "Starting"
    return Finding(status=TRUE, reason=doing, message=f"stage {status.current.stage}, attempt {status.current.attempt}")


def _why_not_progressing(situation: Situation) -> Finding | None:
    status, child = situation.status, situation.child
    if situation.end is not None:
        return Finding(status=FALSE, reason="Finished")
    if status.hold is not None:
        return Finding(status=FALSE, reason="Held", message=status.hold.message)
    if status.current is None and situation.spec.suspend:
        return Finding(status=FALSE, reason="Suspended")
    if child is not None and child.suspended:
        return Finding(status=FALSE, reason="WaitingForQuota")
    if child is None and (situation.name_taken_by is not None or situation.observed.create_error):
        return Finding(status=FALSE, reason="Blocked")
    return None


def _compiled(situation: Situation) -> Finding:
    status = situation.status
    stage = next((stage for stage in status.ladder if stage.name == status.stage), None)
    if stage is None or status.mode is None:
        return Finding(status=UNKNOWN, reason="NotYetDecided")
    if status.mode is Mode.COMPILED:
        return Finding(status=TRUE, reason="Compiled", message=stage.compile_reason)
    if situation.spec.compile.scope is CompileScope.DISABLED:
        return Finding(status=FALSE, reason="CompileDisabled")
    if stage.eager_because:
        return Finding(status=FALSE, reason="FellBack", message=stage.eager_because)
    return Finding(status=FALSE, reason="TrainerChoseEager", message=stage.compile_reason)


def _gate_passed(situation: Situation) -> Finding:
    judged = [stage for stage in situation.status.ladder if stage.gates]
    if not judged:
        return Finding(status=UNKNOWN, reason="NotEvaluated")
    last = max(judged, key=lambda stage: stage.gates[0].attempt)
    return _stage_gates(last)


def _stage_gates(stage: StageStatus) -> Finding:
    failed = gates.blocking(stage.gates, Verdict.FAILED)
    missing = gates.blocking(stage.gates, Verdict.INCONCLUSIVE)
    if (failed or missing) and stage.phase is StagePhase.PASSED:
        return Finding(status=TRUE, reason="Approved", message=f"stage {stage.name}: {stage.message}")
    if failed:
        return Finding(status=FALSE, reason="GateFailed", message=f"stage {stage.name}: {gates.described(failed)}")
    if missing:
        message = f"stage {stage.name}: {gates.described(missing)}"
        return Finding(status=FALSE, reason="GateInconclusive", message=message)
    message = f"stage {stage.name}: {gates.described(gates.enforced(stage.gates))}"
    return Finding(status=TRUE, reason="AllPassed", message=message)


def _degraded(situation: Situation) -> Finding:
    taken, child, restarts = situation.name_taken_by, situation.child, situation.status.restarts
    if taken is not None and child is None:
        message = f"{taken.name} exists and is not ours; delete or rename it"
        return Finding(status=TRUE, reason="NameTaken", message=message)
    if situation.status.current is not None and child is None and situation.observed.create_error:
        return Finding(status=TRUE, reason="ChildCreateFailed", message=situation.observed.create_error)
    trouble = _pods_trouble(child) if child is not None else ""
    if trouble:
        return Finding(status=TRUE, reason="PodsCannotStart", message=trouble)
    if situation.end is None and restarts.failures + restarts.disruptions > 0:
        message = (
            f"{restarts.failures} failures and {restarts.disruptions} disruptions since step {restarts.since_step}"
        )
        return Finding(status=TRUE, reason="Restarts", message=message)
    return Finding(status=FALSE, reason="AsExpected")


def _pods_trouble(child: Child) -> str:
    stuck = (pod for pod in child.pods if pod.phase is PodPhase.PENDING and pod.reason not in _WAITING_IS_NORMAL)
    return "; ".join(f"{pod.name}: {pod.reason} {pod.message}".strip() for pod in list(stuck)[:3])


def _held(situation: Situation) -> Finding:
    held = situation.status.hold
    if held is None:
        return Finding(status=FALSE, reason="NotHeld")
    return Finding(status=TRUE, reason=held.reason, message=f"until {held.deadline}: {held.message}")


def _suspended(situation: Situation) -> Finding:
    if not situation.spec.suspend or situation.end is not None:
        return Finding(status=FALSE, reason="NotSuspended")
    if situation.status.current is not None or situation.other_live_children:
        return Finding(status=FALSE, reason="Stopping")
    return Finding(status=TRUE, reason="SuspendRequested")


def _rolled_back(situation: Situation) -> Finding:
    last = next((one for one in reversed(situation.status.remedies) if one.what == "Rollback"), None)
    if last is None:
        return Finding(status=FALSE, reason="NotRolledBack")
    return Finding(status=TRUE, reason=last.reason, message=last.evidence)


def _succeeded(situation: Situation) -> Finding:
    end = situation.end
    if end is None:
        return Finding(status=FALSE, reason="NotFinished")
    if end.condition is ConditionType.SUCCEEDED:
        return Finding(status=TRUE, reason=end.reason, message=end.message)
    return Finding(status=FALSE, reason="Failed")


def _failed(situation: Situation) -> Finding:
    end = situation.end
    if end is None or end.condition is not ConditionType.FAILED:
        return Finding(status=FALSE, reason="NotFailed")
    return Finding(status=TRUE, reason=end.reason, message=end.message)


_FINDERS: dict[ConditionType, Callable[[Situation], Finding]] = {
    ConditionType.ACCEPTED: _accepted,
    ConditionType.ADMITTED: _admitted,
    ConditionType.RUNNING: _running,
    ConditionType.PROGRESSING: _progressing,
    ConditionType.COMPILED: _compiled,
    ConditionType.GATE_PASSED: _gate_passed,
    ConditionType.DEGRADED: _degraded,
    ConditionType.HELD: _held,
    ConditionType.SUSPENDED: _suspended,
    ConditionType.ROLLED_BACK: _rolled_back,
    ConditionType.SUCCEEDED: _succeeded,
    ConditionType.FAILED: _failed,
}
