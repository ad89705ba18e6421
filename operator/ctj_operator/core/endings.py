"""How an attempt ended, and which pod caused it.

Reads pods, exit codes and reports; decides nothing about what follows.
"""

from dataclasses import dataclass
from enum import StrEnum

from ctj_api.exit_codes import Consequence, ExitCode, consequence_of, reason_of
from ctj_api.report import Report
from ctj_api.status import FirstFailure
from ctj_operator.core.observed import Child, ChildState, Pod, PodPhase


class Kind(StrEnum):
    """What an ending calls for."""

    DONE = "Done"
    STOPPED = "Stopped"
    DISRUPTED = "Disrupted"
    FAILED = "Failed"
    OUT_OF_MEMORY = "OutOfMemory"
    NON_FINITE = "NonFinite"
    PERMANENT = "Permanent"


@dataclass(frozen=True, kw_only=True)
class Ending:
    """One attempt's end."""

    attempt: int
    kind: Kind
    reason: str
    message: str
    at: float
    report: Report | None = None
    """What the pod of global rank 0 said, or the first that said anything."""
    failure: FirstFailure | None = None
    seen_checkpoint_step: int | None = None


_KINDS = {
    Consequence.PERMANENT: Kind.PERMANENT,
    Consequence.RETRY: Kind.FAILED,
    Consequence.STOPPED: Kind.STOPPED,
    # All pods ended well and the Job failed all the same: something outside took it down.
    Consequence.DONE: Kind.DISRUPTED,
}
# Pods that end because another one did: never the cause while there is a better candidate.
_VICTIMS = {int(ExitCode.PEER_LOST): 1, int(ExitCode.STOPPED): 2}


def vanished(attempt: int, *, now: float) -> Ending:
    """Describe the end of an attempt whose child is gone without a word."""
    return Ending(
        attempt=attempt,
        kind=Kind.DISRUPTED,
        reason="ChildMissing",
        message="its Job or processes are gone and left no outcome",
        at=now,
    )


def read_ending(child: Child, *, now: float) -> Ending:
    """Describe how a child that is no longer active ended."""
    finished = [pod.finished_at for pod in child.pods if pod.finished_at is not None]
    at = min(now, max(finished, default=now))
    report = _lead_report(child)
    progress = child.progress
    seen_step = progress.checkpoint_step if progress is not None and progress.attempt == child.attempt else None
    if child.state is ChildState.SUCCEEDED:
        return Ending(
            attempt=child.attempt,
            kind=Kind.DONE,
            reason="Done",
            message="all steps done",
            at=at,
            report=report,
            seen_checkpoint_step=seen_step,
        )
    cause = _first_cause(child)
    kind, reason = _classify(cause)
    return Ending(
        attempt=child.attempt,
        kind=kind,
        reason=reason,
        message=_message(cause),
        at=at,
        report=report,
        failure=None if cause is None else _first_failure(cause, child.attempt, reason),
        seen_checkpoint_step=seen_step,
    )


def _lead_report(child: Child) -> Report | None:
    reports = (pod.report for pod in sorted(child.pods, key=lambda pod: pod.index))
    report = next((report for report in reports if report is not None), None)
    return report if report is not None and report.attempt == child.attempt else None


def _first_cause(child: Child) -> Pod | None:
    failed = [pod for pod in child.pods if pod.phase is PodPhase.FAILED]
    return min(failed, key=_suspicion, default=None)


def _suspicion(pod: Pod) -> tuple[int, float, int]:
    """Order failed pods: causes before victims, then the earliest."""
    victim = 0 if pod.disrupted or pod.exit_code is None else _VICTIMS.get(pod.exit_code, 0)
    return (victim, pod.finished_at if pod.finished_at is not None else float("inf"), pod.index)


def _classify(cause: Pod | None) -> tuple[Kind, str]:
    if cause is None:
        return Kind.DISRUPTED, "PodsLost"
    if cause.disrupted:
        return Kind.DISRUPTED, _word(cause.reason) or "Disrupted"
    if cause.reason == "OOMKilled" or cause.exit_code == ExitCode.OUT_OF_MEMORY:
        return Kind.OUT_OF_MEMORY, _word(cause.reason) or "OutOfMemory"
    if cause.exit_code is None:
        return Kind.DISRUPTED, _word(cause.reason) or "PodLost"
    if cause.exit_code == ExitCode.NON_FINITE:
        return Kind.NON_FINITE, "NonFinite"
    return _KINDS[consequence_of(cause.exit_code)], reason_of(cause.exit_code)


def _word(reason: str) -> str:
    """Keep a platform's reason only where it can stand as a reason of ours."""
    return reason[:64] if reason.isalnum() and reason[:1].isalpha() and reason != "Error" else ""


def _message(cause: Pod | None) -> str:
    if cause is None:
        return "its pods are gone and left no outcome"
    told = cause.report.failure.message if cause.report is not None and cause.report.failure is not None else ""
    code = "no exit code" if cause.exit_code is None else f"exit code {cause.exit_code}"
    where = f"pod {cause.name}" + (f" on {cause.node}" if cause.node else "")
    return f"{where}: {code}" + (f", {told or cause.message}" if told or cause.message else "")


def _first_failure(cause: Pod, attempt: int, reason: str) -> FirstFailure:
    failure = cause.report.failure if cause.report is not None else None
    return FirstFailure(
        pod=cause.name,
        rank=failure.rank if failure is not None else None,
        node=cause.node,
        exit_code=cause.exit_code,
        reason=reason,
        last_lines=(failure.last_lines or failure.message if failure is not None else cause.message)[-1500:],
        attempt=attempt,
    )
