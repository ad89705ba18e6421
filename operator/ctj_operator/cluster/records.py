"""What is kept in memory of a child Job and of a pod: the few fields anybody asks for, parsed once on arrival."""

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from ctj_api import names
from ctj_operator.cluster.manifests import LABEL_INDEX, TRAINER
from ctj_operator.core.observed import PodPhase

Document = dict[str, Any]

# Waiting reasons that are the normal way up, not news.
_STARTING = frozenset({"ContainerCreating", "PodInitializing"})
_PLAIN_ENDS = frozenset({"Completed", "Error", ""})


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildRecord:
    """What Jobs and pods have in common."""

    uid: str
    name: str
    namespace: str
    version: int
    job: str
    """Name of the CompiledTrainingJob, as the labels claim; so are the next two. Anybody may write labels."""
    job_uid: str
    attempt: int
    deleting: bool
    owner_uid: str
    """Of the object that controls this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord(ChildRecord):
    """One attempt's Indexed Job."""

    completions: int
    complete: bool
    failed: bool
    finished_at: float | None
    suspended: bool

    @property
    def ours(self) -> bool:
        """Whether the job that the labels name controls this Job."""
        return self.owner_uid == self.job_uid


@dataclass(frozen=True, kw_only=True, slots=True)
class PodRecord(ChildRecord):
    """One node's part of an attempt; `owner_uid` is empty unless a Job named as one of the attempt controls it."""

    index: int
    phase: PodPhase
    node: str
    ip: str
    control: str
    """The control annotation as it is."""
    exit_code: int | None
    reason: str
    message: str
    disrupted: bool
    finished_at: float | None
    termination_message: str
    """Raw: parsed when asked for, and most are never asked for twice."""
    gone: bool = False
    """The object is removed; kept as evidence for as long as its Job is there."""

    @property
    def alive(self) -> bool:
        """May still be running a process."""
        return not self.gone and self.phase in (PodPhase.PENDING, PodPhase.RUNNING)


def parse_job(document: Document) -> JobRecord:
    """Read a batch/v1 Job that carries our labels."""
    spec, status = document["spec"], document.get("status", {})
    conditions = _true_conditions(status)
    # Not SuccessCriteriaMet or FailureTarget: those come while pods are still ending.
    end = conditions.get("Complete") or conditions.get("Failed")
    return JobRecord(
        **_read_common(document),
        owner_uid=controller_uid(document),
        completions=spec.get("completions") or 1,
        complete="Complete" in conditions,
        failed="Failed" in conditions,
        finished_at=read_time(end.get("lastTransitionTime")) if end else None,
        suspended=bool(spec.get("suspend")),
    )


def parse_pod(document: Document) -> PodRecord:
    """Read a pod that carries our labels; only the trainer's container counts, not sidecars."""
    metadata, status = document["metadata"], document.get("status", {})
    containers: list[Document] = status.get("containerStatuses", [])
    container = next((c for c in containers if c["name"] == TRAINER), {})
    ended = container.get("state", {}).get("terminated", {})
    reason, message = _explain(status, container)
    return PodRecord(
        **_read_common(document),
        owner_uid=_owning_job(document),
        index=_read_number(metadata["labels"].get(LABEL_INDEX)),
        phase=_read_phase(status.get("phase", "Pending")),
        node=document.get("spec", {}).get("nodeName", ""),
        ip=status.get("podIP", ""),
        control=metadata.get("annotations", {}).get(names.ANNOTATION_CONTROL, ""),
        exit_code=ended.get("exitCode"),
        reason=reason,
        message=message,
        disrupted="DisruptionTarget" in _true_conditions(status),
        finished_at=read_time(ended.get("finishedAt")),
        termination_message=ended.get("message", ""),
    )


def _read_common(document: Document) -> dict[str, Any]:
    metadata = document["metadata"]
    labels = metadata["labels"]
    return {
        "uid": metadata["uid"],
        "name": metadata["name"],
        "namespace": metadata["namespace"],
        "version": read_version(document),
        "job": labels[names.LABEL_JOB],
        "job_uid": labels.get(names.LABEL_JOB_UID, ""),
        "attempt": _read_number(labels.get(names.LABEL_ATTEMPT)),
        "deleting": "deletionTimestamp" in metadata,
    }


def bury(pod: PodRecord, *, at: float) -> PodRecord:
    """Record of a pod whose object was removed: one that had not ended was taken away, which is a disruption."""
    if not pod.alive:
        return replace(pod, gone=True)
    return replace(
        pod,
        gone=True,
        phase=PodPhase.FAILED,
        reason=pod.reason or "Deleted",
        message=pod.message or "the pod was deleted",
        disrupted=True,
        finished_at=pod.finished_at or at,
    )


def controller_uid(document: Document) -> str:
    """Uid of the object that controls this one, or nothing."""
    return str(_controller(document).get("uid", ""))


def _owning_job(pod: Document) -> str:
    """Uid of the Job that controls this pod, or nothing if it is no Job or not named as one of the pod's attempt."""
    owner, labels = _controller(pod), pod["metadata"]["labels"]
    name = owner.get("name", "")
    of_attempt = name.startswith(f"{labels[names.LABEL_JOB]}-") and name.endswith(
        f"-{_read_number(labels.get(names.LABEL_ATTEMPT))}"
    )
    return str(owner["uid"]) if owner.get("kind") == "Job" and of_attempt else ""


def _controller(document: Document) -> Document:
    owners: list[Document] = document["metadata"].get("ownerReferences", [])
    return next((owner for owner in owners if owner.get("controller")), {})


def read_version(document: Document) -> int:
    """Resource version as a number: comparable for objects of one kind (Kubernetes KEP-5504, in etcd always so)."""
    return int(document["metadata"]["resourceVersion"])


def read_time(text: str | None) -> float | None:
    """Seconds since the epoch."""
    return datetime.fromisoformat(text).timestamp() if text else None


def _read_number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0


def _read_phase(phase: str) -> PodPhase:
    # "Unknown" means that the node does not answer: the process may well be alive.
    return PodPhase.RUNNING if phase == "Unknown" else PodPhase(phase)


def _true_conditions(status: Document) -> dict[str, Document]:
    return {c["type"]: c for c in status.get("conditions", []) if c["status"] == "True"}


def _explain(status: Document, container: Document) -> tuple[str, str]:
    """Why the pod is where it is, in the platform's words: the pod's own reason, the container's, the scheduler's."""
    if status.get("reason"):
        return status["reason"], status.get("message", "")
    state = container.get("state", {})
    ended, waiting = state.get("terminated"), state.get("waiting", {})
    if ended:
        reason = ended.get("reason", "")
        return ("", "") if reason in _PLAIN_ENDS else (reason, "")
    if waiting.get("reason", "") not in _STARTING and waiting.get("reason"):
        return waiting["reason"], waiting.get("message", "")
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return condition.get("reason", ""), condition.get("message", "")
    return "", ""
