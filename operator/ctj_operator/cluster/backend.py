"""Jobs on the API server as the core's `Backend`: observe from caches, record by compare-and-swap, apply repeatably."""

import time
from typing import Any

from ctj_api import names
from ctj_api.attempt import JobIdentity
from ctj_api.status import CurrentAttempt, Status
from ctj_operator.cluster.api_errors import NotFound, Stale
from ctj_operator.cluster.apply import Applier
from ctj_operator.cluster.caches import key_of
from ctj_operator.cluster.client import JOBS, TRAINING_JOBS
from ctj_operator.cluster.manifests import METRICS_PORT
from ctj_operator.cluster.observe import SETTLE_SECONDS, build_children, is_settling
from ctj_operator.cluster.records import JobRecord, PodRecord, controller_uid
from ctj_operator.cluster.surroundings import Surroundings
from ctj_operator.core.decision import Decision
from ctj_operator.core.observed import Child, Observed, PodPhase
from ctj_operator.core.reconcile import Conflict

Document = dict[str, Any]

_STATUS_FIELDS = frozenset(field.alias or name for name, field in Status.model_fields.items())


class ClusterBackend:
    """Implements `ctj_operator.core.reconcile.Backend`; called for one key by one thread at a time."""

    def __init__(self, surroundings: Surroundings):
        self._around = surroundings
        self._applier = Applier(surroundings)

    def observe(self, key: str) -> Observed | None:
        """Answer from the caches; only a child that has vanished is asked for."""
        document = self._around.jobs.get(key)
        if document is None:
            self._around.scraper.forget(key)
            self._applier.forget(key)
            return None
        metadata, spec, status = document["metadata"], document["spec"], _parse_status(document)
        job = JobIdentity(namespace=metadata["namespace"], name=metadata["name"], uid=metadata["uid"])
        self._confirm_absence(job, status.current)
        return Observed(
            job=job,
            generation=metadata["generation"],
            resource_version=metadata["resourceVersion"],
            spec=spec,
            status=status,
            annotations=metadata.get("annotations", {}),
            deleting="deletionTimestamp" in metadata,
            children=self._children_of(job, key=key) + self._applier.strangers(job),
            create_error=self._applier.refusal(job, attempt=status.attempt),
        )

    def record(self, observed: Observed, decision: Decision) -> None:
        """Store the status over the very version that was observed."""
        key = key_of(observed.job.namespace, observed.job.name)
        document = self._around.jobs.get(key)
        if document is None or document["metadata"]["resourceVersion"] != observed.resource_version:
            raise Conflict(f"{key} changed while it was being decided")
        try:
            stored = self._around.client.replace(
                TRAINING_JOBS, _with_status(document, decision.status), subresource="status"
            )
        except (Stale, NotFound) as error:
            self._around.refresh(key)
            raise Conflict(str(error)) from error
        self._around.jobs.put(stored)
        self._around.on_record(observed.job, observed.status, decision.status)

    def apply(self, observed: Observed, decision: Decision) -> None:
        """Act on a decision whose status is stored."""
        self._applier.apply(observed, decision)

    def _confirm_absence(self, job: JobIdentity, current: CurrentAttempt | None) -> None:
        """Ask the server before a child that was seen is reported missing: the cache may be behind."""
        jobs = self._around.children.jobs
        if current is None or not current.child_seen or jobs.has(job, attempt=current.attempt):
            return
        name = names.child_name(job.name, current.stage, current.attempt)
        try:
            live = self._around.client.get(JOBS, namespace=job.namespace, name=name)
        except NotFound:
            return
        if controller_uid(live) == job.uid:
            jobs.put(live)

    def _children_of(self, job: JobIdentity, *, key: str) -> tuple[Child, ...]:
        now, jobs, pods = time.time(), self._around.children.jobs.of_job(job), self._around.children.pods.of_job(job)
        self._follow_progress(key, jobs=jobs, pods=pods)
        if any(is_settling(one, pods=[p for p in pods if p.attempt == one.attempt], now=now) for one in jobs):
            self._around.look_later(key, SETTLE_SECONDS)
        return build_children(
            jobs=jobs,
            pods=pods,
            progress_of=lambda child_uid: self._around.scraper.latest(key, child_uid=child_uid),
            now=now,
        )

    def _follow_progress(self, key: str, *, jobs: list[JobRecord], pods: list[PodRecord]) -> None:
        uids = {job.attempt: job.uid for job in jobs if job.ours}
        first = next((p for p in pods if p.index == 0 and not p.gone and p.phase is PodPhase.RUNNING and p.ip), None)
        if first is None or first.attempt not in uids:
            self._around.scraper.forget(key)
        else:
            host = f"[{first.ip}]" if ":" in first.ip else first.ip
            self._around.scraper.follow(key, child_uid=uids[first.attempt], address=f"{host}:{METRICS_PORT}")


def _parse_status(document: Document) -> Status:
    """Read our part of the stored status; other field managers keep theirs beside it."""
    stored = document.get("status", {})
    return Status.from_document({k: v for k, v in stored.items() if k in _STATUS_FIELDS})


def _with_status(document: Document, status: Status) -> Document:
    """Return the object as observed, with our part of its status replaced."""
    foreign = {k: v for k, v in document.get("status", {}).items() if k not in _STATUS_FIELDS}
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {k: document["metadata"][k] for k in ("name", "namespace", "uid", "resourceVersion")},
        "spec": document["spec"],
        "status": {**foreign, **status.to_document()},
    }
