"""Makes the cluster follow a recorded decision: creates, deletes and steers children. All of it repeatable."""

import time
from dataclasses import dataclass
from typing import Any

from ctj_api import names
from ctj_api.attempt import Attempt, JobIdentity
from ctj_api.control import Control
from ctj_operator.cluster.api_errors import AlreadyExists, NotFound, Refused, Stale
from ctj_operator.cluster.caches import key_of
from ctj_operator.cluster.client import JOBS, PODS, SERVICES, TRAINING_JOBS, Resource
from ctj_operator.cluster.manifests import CannotBuild, Owner, build_job, build_service, choose_pods
from ctj_operator.cluster.records import JobRecord, controller_uid
from ctj_operator.cluster.surroundings import Surroundings
from ctj_operator.core.decision import Decision
from ctj_operator.core.observed import Child, ChildState, Observed
from ctj_operator.core.reconcile import Conflict

Document = dict[str, Any]

_TAKEN_SECONDS = 60.0  # then the name is tried again: whoever had it may have left


@dataclass(frozen=True, kw_only=True)
class _Taken:
    """A child's name that somebody else has."""

    job_uid: str
    by: Child
    until: float


@dataclass(frozen=True, kw_only=True)
class _Refused:
    """A child that the API server, or we ourselves, would not make."""

    job_uid: str
    attempt: int
    reason: str


class Applier:
    """Also remembers, until the next try, why a child could not be made: no watch tells that."""

    def __init__(self, surroundings: Surroundings):
        self._around = surroundings
        self._taken: dict[str, _Taken] = {}
        self._refused: dict[str, _Refused] = {}

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

    def strangers(self, job: JobIdentity) -> tuple[Child, ...]:
        """Return the object of somebody else that had our child's name a moment ago."""
        taken = self._taken.get(key_of(job.namespace, job.name))
        if taken is None or taken.job_uid != job.uid or taken.until < time.monotonic():
            return ()
        return (taken.by,)

    def refusal(self, job: JobIdentity, *, attempt: int) -> str:
        """Return why this attempt's child was refused when last asked for."""
        refused = self._refused.get(key_of(job.namespace, job.name))
        return refused.reason if refused and (refused.job_uid, refused.attempt) == (job.uid, attempt) else ""

    def forget(self, key: str) -> None:
        """Drop what was remembered of a job that is gone."""
        self._taken.pop(key, None)
        self._refused.pop(key, None)

    # Delete

    def _confirm(self, observed: Observed) -> None:
        """Nothing is destroyed on the word of a cache: without a write of this pass, the server is asked.

        Raises:
            Conflict: the stored job is not the one this was decided on.
        """
        key = _key(observed)
        self._around.refresh(key)
        current = self._around.jobs.get(key)
        if current is None or current["metadata"]["resourceVersion"] != observed.resource_version:
            raise Conflict(f"{key} changed before something of it could be deleted")

    def _delete_child(self, observed: Observed, uid: str) -> None:
        record = next((job for job in self._around.children.jobs.of_job(observed.job) if job.uid == uid), None)
        child = next((child for child in observed.children if child.uid == uid), None)
        if record is None or child is None or not child.ours:
            return
        running = child.state is ChildState.ACTIVE
        self._delete(JOBS, record.namespace, record.name, uid=uid, wait=running)
        if record.completions > 1:
            self._delete_service(observed, record)

    def _delete_service(self, observed: Observed, record: JobRecord) -> None:
        try:
            service = self._around.client.get(SERVICES, namespace=record.namespace, name=record.name)
        except NotFound:
            return
        if controller_uid(service) == observed.job.uid:
            uid = service["metadata"]["uid"]
            self._delete(SERVICES, record.namespace, record.name, uid=uid, wait=False)

    def _delete(self, resource: Resource, namespace: str, name: str, *, uid: str, wait: bool) -> None:
        """Delete that very object; gone or replaced is as good."""
        try:
            self._around.client.delete(resource, namespace=namespace, name=name, uid=uid, wait_for_dependents=wait)
        except (NotFound, Stale):
            if resource is JOBS:
                self._around.children.jobs.remove(uid)

    # Create

    def _create(self, observed: Observed, attempt: Attempt) -> None:
        owner = self._owner(observed)
        if owner is None:
            return
        try:
            self._create_children(observed, attempt, owner=owner)
        except (CannotBuild, Refused) as problem:
            self._refused[_key(observed)] = _Refused(
                job_uid=observed.job.uid, attempt=attempt.attempt, reason=str(problem)
            )
            self._around.look_later(_key(observed), 0.0)  # so that the status says it
        else:
            self._refused.pop(_key(observed), None)

    def _owner(self, observed: Observed) -> Owner | None:
        document = self._around.jobs.get(_key(observed))
        if document is None:
            return None
        metadata = document["metadata"]
        return Owner(
            name=observed.job.name,
            namespace=observed.job.namespace,
            uid=observed.job.uid,
            labels=metadata.get("labels", {}),
            annotations=metadata.get("annotations", {}),
        )

    def _create_children(self, observed: Observed, attempt: Attempt, *, owner: Owner) -> None:
        """The Service goes first: names must resolve by the time the pods ask."""
        settings = self._around.settings
        pods = choose_pods(
            observed.spec,
            attempt=attempt,
            default_image=settings.default_image,
            default_checkpoint_claim=settings.checkpoint_claim,
            default_cache_claim=settings.compile_cache_claim,
        )
        service = build_service(attempt, owner=owner)
        if service is not None and not self._create_once(SERVICES, service, observed=observed, attempt=attempt):
            return
        document = build_job(attempt, owner=owner, pods=pods)
        job = self._create_once(JOBS, document, observed=observed, attempt=attempt)
        if job:
            self._around.children.jobs.put(job)

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
            return existing
        stranger = Child(
            name=metadata["name"],
            uid=existing["metadata"]["uid"],
            attempt=attempt.attempt,
            state=ChildState.ACTIVE,
            ours=False,
        )
        until = time.monotonic() + _TAKEN_SECONDS
        self._taken[_key(observed)] = _Taken(job_uid=observed.job.uid, by=stranger, until=until)
        self._around.look_later(_key(observed), 0.0)
        return None

    # Steer

    def _steer(self, observed: Observed, control: Control) -> None:
        """Let every pod that may still act see the state; pods that see it already cost nothing."""
        text = control.model_dump_json(by_alias=True)
        for pod in self._around.children.pods.of_job(observed.job):
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
