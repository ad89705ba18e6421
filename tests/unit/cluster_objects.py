"""Builders of Kubernetes objects for unit tests: each shows only what matters to it."""

from typing import Any

from ctj_api import names
from ctj_api.attempt import Attempt, JobIdentity

Document = dict[str, Any]

JOB_UID = "11111111-2222-3333-4444-555555555555"
JOB = JobIdentity(namespace="research", name="llama", uid=JOB_UID)


def attempt(*, number: int = 1, stage: Document | None = None, **changes: Any) -> Attempt:
    this_stage = {"name": "full", "strategy": "ddp", **(stage or {})}
    document: Document = {
        "job": {"namespace": "research", "name": "llama", "uid": JOB_UID},
        "attempt": number,
        "stage": this_stage,
        "window": {"startStep": 0, "endStep": 10, "saveAt": [10]},
        "ladder": [this_stage],
        "floorStep": 0,
        "mode": "Compiled",
        "microBatchSize": 4,
        "recipe": {"name": "causal_lm", "config": {"text": 'quotes " and ünïcode'}},
        "training": {"steps": 10, "globalBatchSize": 8, "microBatchSize": 4},
        "compile": {},
    }
    return Attempt.from_document({**document, **changes})


def owner_reference(uid: str = JOB_UID) -> Document:
    return {"kind": names.KIND, "name": "llama", "uid": uid, "controller": True}


def job_object(*, uid: str = "", number: int = 1, version: int = 10, owner: str = JOB_UID, **status: Any) -> Document:
    """Its uid is `job-{number}` unless another is given."""
    return {
        "metadata": {
            "name": f"llama-full-{number}",
            "namespace": "research",
            "uid": uid or f"job-{number}",
            "resourceVersion": str(version),
            "ownerReferences": [owner_reference(owner)],
            "labels": _labels(number),
        },
        "spec": {"completions": 1},
        "status": status,
    }


def pod_object(
    *,
    uid: str = "pod-1",
    number: int = 1,
    index: int = 0,
    version: int = 10,
    phase: str = "Running",
    namespace: str = "research",
    owner: str = "",
    deleting: bool = False,
    **status: Any,
) -> Document:
    """A Job of uid `job-{number}` controls it unless another is given."""
    controller = {"kind": "Job", "name": f"llama-full-{number}", "uid": owner or f"job-{number}", "controller": True}
    return {
        "metadata": {
            "name": f"llama-full-{number}-{index}-xyz",
            "namespace": namespace,
            "uid": uid,
            "resourceVersion": str(version),
            **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleting else {}),
            "ownerReferences": [controller],
            "labels": {**_labels(number), "batch.kubernetes.io/job-completion-index": str(index)},
        },
        "spec": {"nodeName": "node-a"},
        "status": {"phase": phase, **status},
    }


def ended(exit_code: int, *, reason: str = "Error", message: str = "", at: str = "2026-01-01T00:00:00Z") -> Document:
    """Return the status fields of a pod whose trainer ended."""
    state = {"terminated": {"exitCode": exit_code, "reason": reason, "message": message, "finishedAt": at}}
    return {"containerStatuses": [{"name": "sidecar", "state": {}}, {"name": "trainer", "state": state}]}


def waiting(reason: str) -> Document:
    """Return the status fields of a pod whose trainer has not started."""
    return {"containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": reason}}}]}


def condition(kind: str, *, at: str = "2026-01-01T00:00:00Z", **more: str) -> Document:
    return {"type": kind, "status": "True", "lastTransitionTime": at, **more}


def _labels(number: int) -> dict[str, str]:
    return {names.LABEL_JOB: "llama", names.LABEL_JOB_UID: JOB_UID, names.LABEL_ATTEMPT: str(number)}
