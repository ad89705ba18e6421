"""What a backend saw of one job, as one frozen value: the only input of `decide` beside the clock.

Built by `local.backend` and `cluster.backend`; never holds a client, a file handle or anything to be called.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ctj_api.attempt import JobIdentity
from ctj_api.report import Progress, Report
from ctj_api.status import Status


class ChildState(StrEnum):
    """State of one attempt's Job or process group; terminal only when none of its pods is alive any more."""

    ACTIVE = "Active"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class PodPhase(StrEnum):
    """Where one pod, or local process group, is in its life."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


@dataclass(frozen=True, kw_only=True)
class Pod:
    """One node's part of an attempt."""

    name: str
    index: int
    phase: PodPhase
    node: str = ""
    exit_code: int | None = None
    reason: str = ""
    """The platform's word: OOMKilled, Evicted, ImagePullBackOff, Unschedulable, ..."""
    message: str = ""
    disrupted: bool = False
    """Evicted, preempted or its node lost (DisruptionTarget): not the job's fault."""
    finished_at: float | None = None
    report: Report | None = None


@dataclass(frozen=True, kw_only=True)
class Child:
    """One attempt as the backend runs it.

    Pods that outlive their Job (deleted by somebody without waiting) still make a child: ACTIVE and deleting.
    """

    name: str
    uid: str
    attempt: int
    state: ChildState
    ours: bool = True
    """False: somebody else owns an object of this name; it is never adopted or deleted."""
    deleting: bool = False
    suspended: bool = False
    """Suspended from outside (Kueue): waiting for quota, not a failure."""
    pods: tuple[Pod, ...] = ()
    progress: Progress | None = None


@dataclass(frozen=True, kw_only=True)
class Observed:
    """One job and its children at one moment."""

    job: JobIdentity
    generation: int
    resource_version: str
    spec: dict[str, Any]
    status: Status
    annotations: dict[str, str] = field(default_factory=dict)
    deleting: bool = False
    children: tuple[Child, ...] = ()
    """All of them, also finished ones. Before the recorded attempt's child is left out although `child_seen` is set,
    its absence must be confirmed by a live read: `decide` takes it as lost and starts another attempt."""
    create_error: str = ""
    """Why the recorded attempt's child was refused when last asked for (quota, rights, ...); it does not exist."""
