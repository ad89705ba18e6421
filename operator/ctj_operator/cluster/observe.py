"""Turns records of Jobs and pods into what the core understands: children, their states, their evidence. Pure."""

import json
from collections.abc import Callable

from pydantic import ValidationError

from ctj_api.report import Progress, Report
from ctj_operator.cluster.records import JobRecord, PodRecord
from ctj_operator.core.observed import Child, ChildState, Pod, PodPhase

# A Job's end may be seen before its pods' end: two watches, each in order, but not with each other.
SETTLE_SECONDS = 5.0


def build_children(
    *,
    jobs: list[JobRecord],
    pods: list[PodRecord],
    progress_of: Callable[[str], Progress | None],
    now: float,
) -> tuple[Child, ...]:
    """Return every attempt that can be seen, oldest first, also one of which only pods are left."""
    known = [
        _build_child(
            job, pods=_of_attempt(pods, job.attempt) if job.ours else [], progress=progress_of(job.uid), now=now
        )
        for job in jobs
    ]
    attempts = {job.attempt for job in jobs if job.ours}
    orphaned = {pod.attempt for pod in pods if pod.alive and pod.attempt not in attempts}
    orphans = [_build_orphan(attempt, pods=_of_attempt(pods, attempt)) for attempt in orphaned]
    # Ours before a stranger's of the same attempt: the same sight gives the same value, whatever order a set has.
    return tuple(sorted(known + orphans, key=lambda child: (child.attempt, not child.ours, child.uid)))


def is_settling(job: JobRecord, *, pods: list[PodRecord], now: float) -> bool:
    """Is the Job over, but its pods' reports are still on their way to us?"""
    if not (job.complete or job.failed) or now - (job.finished_at or 0.0) > SETTLE_SECONDS:
        return False
    ended = [pod for pod in pods if not pod.alive]
    if job.complete:
        return len(ended) < job.completions
    return not any(pod.phase is PodPhase.FAILED for pod in ended)


def parse_report(message: str) -> Report | None:
    """Read a termination message; anything else that a container may have written is no report."""
    if not message.startswith("{"):
        return None
    try:
        return Report.from_document(json.loads(message))
    except (ValueError, ValidationError):
        return None


def _of_attempt(pods: list[PodRecord], attempt: int) -> list[PodRecord]:
    return sorted((pod for pod in pods if pod.attempt == attempt), key=lambda pod: pod.index)


def _build_child(job: JobRecord, *, pods: list[PodRecord], progress: Progress | None, now: float) -> Child:
    return Child(
        name=job.name,
        uid=job.uid,
        attempt=job.attempt,
        state=_state(job, pods=pods, now=now),
        ours=job.ours,
        deleting=job.deleting,
        suspended=job.suspended,
        pods=tuple(_build_pod(pod) for pod in pods),
        progress=progress,
    )


def _build_orphan(attempt: int, *, pods: list[PodRecord]) -> Child:
    """Pods whose Job is gone: on their way out, yet alive, so nothing may start beside them."""
    return Child(
        name=f"pods of attempt {attempt}",
        uid=f"orphans-{attempt}",
        attempt=attempt,
        state=ChildState.ACTIVE,
        deleting=True,
        pods=tuple(_build_pod(pod) for pod in pods),
    )


def _state(job: JobRecord, *, pods: list[PodRecord], now: float) -> ChildState:
    if any(pod.alive for pod in pods) or is_settling(job, pods=pods, now=now):
        return ChildState.ACTIVE
    # Every index done: no further pod will come, and the Job's own condition is a second or more behind.
    done = {pod.index for pod in pods if pod.phase is PodPhase.SUCCEEDED}
    if job.complete or len(done) == job.completions:
        return ChildState.SUCCEEDED
    return ChildState.FAILED if job.failed else ChildState.ACTIVE


def _build_pod(record: PodRecord) -> Pod:
    return Pod(
        name=record.name,
        index=record.index,
        phase=record.phase,
        node=record.node,
        exit_code=record.exit_code,
        reason=record.reason,
        message=record.message,
        disrupted=record.disrupted,
        finished_at=record.finished_at,
        report=parse_report(record.termination_message),
    )
