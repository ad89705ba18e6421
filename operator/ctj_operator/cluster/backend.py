"""Jobs on the API server as the core's `Backend`: observe from caches, record by compare-and-swap, apply repeatably."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ctj_api import names
from ctj_api.attempt import Attempt, JobIdentity
from ctj_api.control import Control
from ctj_api.status import Status
from ctj_operator.cluster.api_errors import AlreadyExists, NotFound, Refused, Stale
from ctj_operator.cluster.caches import Children, JobCache, key_of, split_key
from ctj_operator.cluster.client import JOBS, PODS, SERVICES, TRAINING_JOBS, ApiClient, Resource
from ctj_operator.cluster.events import EventPoster
from ctj_operator.cluster.manifests import (
    METRICS_PORT,
    CannotBuild,
    Owner,
    build_job,
    build_service,
    choose_pods,
)
from ctj_operator.cluster.observe import SETTLE_SECONDS, build_children, is_settling
from ctj_operator.cluster.records import JobRecord, PodRecord, controller_uid
from ctj_operator.cluster.scrape import ProgressScraper
from ctj_operator.cluster.settings import Settings
from ctj_operator.core.decision import Decision, Event, EventType
from ctj_operator.core.observed import Child, ChildState, Observed, PodPhase
from ctj_operator.core.reconcile import Conflict

Document = dict[str, Any]

_TAKEN_SECONDS = 60.0  # then the name is tried again: whoever had it may have left

_STATUS_FIELDS = frozenset(field.alias or name for name, field in Status.model_fields.items())

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a backend works with; put together once, in `operator.py`."""

    client: ApiClient
    jobs: JobCache
    children: Children
    scraper: ProgressScraper
    poster: EventPoster
    settings: Settings
    look_later: Callable[[str, float], None]
    """Have a key looked at again after so many seconds."""
    on_record: Callable[[JobIdentity, Status, Status], None]
    """Told of every stored change of a status: identity, before, after."""


class ClusterBackend:
    """Implements `ctj_operator.core.reconcile.Backend`; called for one key by one thread at a time."""

    def __init__(self, surroundings: Surroundings):
        self._around = surroundings
        self._taken: dict[str, tuple[float, Child]] = {}

    # Observe

    def observe(self, key: str) -> Observed | None:
        """Answer from the caches alone."""
        document = self._around.jobs.get(key)
        if document is None:
            self._around.scraper.forget(key)
            return None
        metadata, spec = document["metadata"], document["spec"]
        uid = metadata["uid"]
        return Observed(
            job=JobIdentity(namespace=metadata["namespace"], name=metadata["name"], uid=uid),
            generation=metadata["generation"],
            resource_version=metadata["resourceVersion"],
            spec=spec,
            status=_parse_status(document),
            annotations=metadata.get("annotations", {}),
            deleting="deletionTimestamp" in metadata,
            children=self._children_of(uid, key=key),
            on_accelerator=any(stage.get("gpusPerNode") for stage in spec["ladder"]),
        )

    def _children_of(self, uid: str, *, key: str) -> tuple[Child, ...]:
        now, jobs, pods = time.time(), self._around.children.jobs.of_job(uid), self._around.children.pods.of_job(uid)
        self._follow_progress(key, jobs=jobs, pods=pods)
        if any(is_settling(job, pods=[p for p in pods if p.attempt == job.attempt], now=now) for job in jobs):
            self._around.look_later(key, SETTLE_SECONDS)
        children = build_children(
            uid,
            jobs=jobs,
            pods=pods,
            progress_of=lambda child_uid: self._around.scraper.latest(key, child_uid=child_uid),
            now=now,
        )
        return children + self._taken_names(uid, now=now)

    def _follow_progress(self, key: str, *, jobs: list[JobRecord], pods: list[PodRecord]) -> None:
        uids = {job.attempt: job.uid for job in jobs}
        first = next((p for p in pods if p.index == 0 and not p.gone and p.phase is PodPhase.RUNNING and p.ip), None)
        if first is None or first.attempt not in uids:
            self._around.scraper.forget(key)
        else:
            address = f"{first.ip}:{METRICS_PORT}" if ":" not in first.ip else f"[{first.ip}]:{METRICS_PORT}"
            self._around.scraper.follow(key, child_uid=uids[first.attempt], address=address)

    def _taken_names(self, uid: str, *, now: float) -> tuple[Child, ...]:
        until, child = self._taken.get(uid, (0.0, None))
        if child is None or until < now:
            self._taken.pop(uid, None)
            return ()
        return (child,)

    # Record

    def record(self, observed: Observed, decision: Decision) -> None:
        """Store the status over the very version that was observed."""
        key = _key(observed)
        document = self._around.jobs.get(key)
        if document is None or document["metadata"]["resourceVersion"] != observed.resource_version:
            raise Conflict(f"{key} changed while it was being decided")
        foreign = {k: v for k, v in document.get("status", {}).items() if k not in _STATUS_FIELDS}
        metadata = {k: document["metadata"][k] for k in ("name", "namespace", "uid", "resourceVersion")}
        update = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": metadata,
            "spec": document["spec"],
            "status": {**foreign, **decision.status.to_document()},
        }
        try:
            stored = self._around.client.replace(TRAINING_JOBS, update, subresource="status")
        except (Stale, NotFound) as error:
            self.refresh(key)
            raise Conflict(str(error)) from error
        self._around.jobs.put(stored)
        self._around.on_record(observed.job, observed.status, decision.status)

    def refresh(self, key: str) -> None:
        """Read one job live: the watch is behind what the server has."""
        namespace, name = split_key(key)
        known = self._around.jobs.get(key)
        try:
            self._around.jobs.put(self._around.client.get(TRAINING_JOBS, namespace=namespace, name=name))
        except NotFound:
            if known:
                self._around.jobs.remove(known)

    # Apply

    def apply(self, observed: Observed, decision: Decision) -> None:
        """Tell, then act; whatever is lost in between is found missing by the next pass."""
        for event in decision.events:
            self._around.poster.post(observed.job, event, once_per=observed.resource_version)
        if (decision.delete or decision.delete_job) and decision.status == observed.status:
            self._confirm(observed)
        for uid in decision.delete:
            self._delete_child(observed, uid)
        if decision.create:
            self._create(observed, decision.create)
        if decision.control:
            self._steer(observed, decision.control)
        if decision.delete_job:
            self._delete(TRAINING_JOBS, observed.job.namespace, observed.job.name, uid=observed.job.uid, wait=False)

    def _confirm(self, observed: Observed) -> None:
        """Nothing is destroyed on the word of a cache: without a write of this pass, the server is asked.

        Raises:
            Conflict: the stored job is not the one this was decided on.
        """
        key = _key(observed)
        self.refresh(key)
        current = self._around.jobs.get(key)
        if current is None or current["metadata"]["resourceVersion"] != observed.resource_version:
            raise Conflict(f"{key} changed before something of it could be deleted")

    def _delete_child(self, observed: Observed, uid: str) -> None:
        record = next((r for r in self._around.children.jobs.of_job(observed.job.uid) if r.uid == uid), None)
        child = next((c for c in observed.children if c.uid == uid), None)
        if record is None or child is None or not child.ours:
            return
        running = child.state is ChildState.ACTIVE
        self._delete(JOBS, record.namespace, record.name, uid=uid, wait=running)
        if record.completions > 1:
            self._delete_service(observed, record)

    def _delete(self, resource: Resource, namespace: str, name: str, *, uid: str, wait: bool) -> None:
        """Delete that very object; gone or replaced is as good."""
        try:
            self._around.client.delete(resource, namespace=namespace, name=name, uid=uid, wait_for_dependents=wait)
        except (NotFound, Stale):
            if resource is JOBS:
                self._around.children.jobs.remove(uid)

    def _delete_service(self, observed: Observed, record: JobRecord) -> None:
        try:
            service = self._around.client.get(SERVICES, namespace=record.namespace, name=record.name)
        except NotFound:
            return
        if controller_uid(service) == observed.job.uid:
            uid = service["metadata"]["uid"]
            self._delete(SERVICES, record.namespace, record.name, uid=uid, wait=False)

    def _create(self, observed: Observed, attempt: Attempt) -> None:
        settings, document = self._around.settings, self._around.jobs.get(_key(observed))
        if document is None:
            return
        metadata = document["metadata"]
        owner = Owner(
            name=observed.job.name,
            namespace=observed.job.namespace,
            uid=observed.job.uid,
            labels=metadata.get("labels", {}),
            annotations=metadata.get("annotations", {}),
        )
        try:
            pods = choose_pods(
                observed.spec,
                attempt=attempt,
                default_image=settings.default_image,
                default_checkpoint_claim=settings.checkpoint_claim,
            )
            service = build_service(attempt, owner=owner)
            if service is None or self._create_once(SERVICES, service, observed=observed, attempt=attempt):
                job = self._create_once(
                    JOBS, build_job(attempt, owner=owner, pods=pods), observed=observed, attempt=attempt
                )
                if job:
                    self._around.children.jobs.put(job)
        except (CannotBuild, Refused) as problem:
            event = Event(type=EventType.WARNING, reason="ChildCreateFailed", message=str(problem))
            self._around.poster.post(observed.job, event, once_per=str(attempt.attempt))
            raise

    def _create_once(
        self, resource: Resource, document: Document, *, observed: Observed, attempt: Attempt
    ) -> Document | None:
        """Create, or find that it was created before; None if somebody else has the name, which is then remembered."""
        metadata = document["metadata"]
        try:
            return self._around.client.create(resource, document)
        except AlreadyExists:
            existing = self._around.client.get(resource, namespace=metadata["namespace"], name=metadata["name"])
        if controller_uid(existing) == observed.job.uid:
            return {"apiVersion": document["apiVersion"], "kind": document["kind"], **existing}
        stranger = Child(
            name=metadata["name"],
            uid=existing["metadata"]["uid"],
            attempt=attempt.attempt,
            state=ChildState.ACTIVE,
            ours=False,
        )
        self._taken[observed.job.uid] = (time.time() + _TAKEN_SECONDS, stranger)
        self._around.look_later(_key(observed), 0.0)
        return None

    def _steer(self, observed: Observed, control: Control) -> None:
        """Let every pod that may still act see the state; pods that see it already cost nothing."""
        text = control.model_dump_json(by_alias=True)
        for pod in self._around.children.pods.of_job(observed.job.uid):
            if pod.attempt != control.attempt or not pod.alive or pod.deleting or pod.control == text:
                continue
            patch = {"metadata": {"uid": pod.uid, "annotations": {names.ANNOTATION_CONTROL: text}}}
            try:
                patched = self._around.client.merge(PODS, patch, namespace=pod.namespace, name=pod.name)
            except (NotFound, Stale):
                continue  # it ended meanwhile; the watch will say so
            self._around.children.pods.put(patched)


def _key(observed: Observed) -> str:
    return key_of(observed.job.namespace, observed.job.name)


def _parse_status(document: Document) -> Status:
    """Read our part of the stored status; other field managers keep theirs beside it."""
    stored = document.get("status", {})
    return Status.from_document({k: v for k, v in stored.items() if k in _STATUS_FIELDS})
