"""What the watches and our own writes have told so far: jobs (whole) and their children (records). Newest version wins.

Labels only claim: a pod counts if a Job controls it that our job controls, all in one namespace. Whoever may create
pods elsewhere can neither forge evidence nor block a start.

Answers reconcile without a read. Thread-safe; nothing here talks to the API server.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Generic, TypeVar

from ctj_api.attempt import JobIdentity
from ctj_operator.cluster.records import ChildRecord, JobRecord, PodRecord, bury, parse_job, parse_pod, read_version

Document = dict[str, Any]

_TOMBSTONES = 4096  # removed uids remembered, so that a late answer of our own write raises no ghost


def key_of(namespace: str, name: str) -> str:
    """Name a job everywhere in the operator."""
    return f"{namespace}/{name}"


def split_key(key: str) -> tuple[str, str]:
    """Return namespace and name."""
    namespace, _, name = key.partition("/")
    return namespace, name


class JobCache:
    """Newest known document of every CompiledTrainingJob, by key."""

    def __init__(self) -> None:
        self._documents: dict[str, Document] = {}
        self._removed: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, document: Document) -> bool:
        """Keep the document if it is newer than what is known; say whether it was."""
        metadata = document["metadata"]
        key = key_of(metadata["namespace"], metadata["name"])
        with self._lock:
            known = self._documents.get(key)
            if metadata["uid"] in self._removed or (known and read_version(known) >= read_version(document)):
                return False
            slim = {k: v for k, v in metadata.items() if k != "managedFields"}
            self._documents[key] = {**document, "metadata": slim}
            return True

    def remove(self, document: Document) -> None:
        """Forget a deleted object, unless a later one of the same name is known already."""
        metadata = document["metadata"]
        key = key_of(metadata["namespace"], metadata["name"])
        with self._lock:
            _remember(self._removed, metadata["uid"])
            known = self._documents.get(key)
            if known and known["metadata"]["uid"] == metadata["uid"]:
                del self._documents[key]

    def keep_only(self, uids: Iterable[str], *, version: int, namespace: str | None) -> list[str]:
        """Remove what a listing of `version` does not name, since its deletion was missed; return their keys."""
        listed = set(uids)
        missed = [
            document
            for document in self.all()
            if namespace in (None, document["metadata"]["namespace"])
            and read_version(document) <= version
            and document["metadata"]["uid"] not in listed
        ]
        for document in missed:
            self.remove(document)
        return [key_of(document["metadata"]["namespace"], document["metadata"]["name"]) for document in missed]

    def get(self, key: str) -> Document | None:
        """Return the shared document: never change it."""
        with self._lock:
            return self._documents.get(key)

    def all(self) -> list[Document]:
        """Return every document, for metrics and resync."""
        with self._lock:
            return list(self._documents.values())


R = TypeVar("R", bound=ChildRecord)


class RecordCache(Generic[R]):
    """Children of one kind, by uid and by the CompiledTrainingJob that their labels name, in their own namespace."""

    def __init__(self, parse: Callable[[Document], R], *, on_change: Callable[[str], None]):
        self._parse = parse
        self._on_change = on_change
        self._records: dict[str, R] = {}
        self._by_job: dict[tuple[str, str], set[str]] = {}
        self._removed: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.RLock()

    def put(self, document: Document) -> None:
        """Keep what is newer; the job it belongs to must be looked at again."""
        record = self._parse(document)
        with self._lock:
            known = self._records.get(record.uid)
            if record.uid in self._removed or (known and known.version >= record.version):
                return
            self._records[record.uid] = record
            self._by_job.setdefault(_claimed_job(record), set()).add(record.uid)
        if known and replace(known, version=record.version) == record:
            return  # readiness, managed fields, ...: nothing that anybody decides on
        self._on_change(key_of(record.namespace, record.job))

    def remove(self, uid: str) -> None:
        """Forget a deleted child."""
        with self._lock:
            record = self._records.get(uid)
            _remember(self._removed, uid)
            if record is None:
                return
            self._drop(record)
        self._on_change(key_of(record.namespace, record.job))

    def keep_only(self, uids: Iterable[str], *, version: int, namespace: str | None) -> None:
        """Remove what a listing of `version` does not name, since its deletion was missed; what is newer stays."""
        listed = set(uids)
        with self._lock:
            known = [r for r in self._records.values() if namespace in (None, r.namespace) and r.version <= version]
        for record in known:
            if record.uid not in listed:
                self.remove(record.uid)

    def of_job(self, job: JobIdentity) -> list[R]:
        """Return the children of one job."""
        return self._claiming((job.namespace, job.uid))

    def _claiming(self, job: tuple[str, str]) -> list[R]:
        with self._lock:
            return [self._records[uid] for uid in self._by_job.get(job, ())]

    def _drop(self, record: R) -> None:
        del self._records[record.uid]
        siblings = self._by_job[_claimed_job(record)]
        siblings.discard(record.uid)
        if not siblings:
            del self._by_job[_claimed_job(record)]


class PodCache(RecordCache[PodRecord]):
    """Pods; one that is removed stays as evidence of its end for as long as its Job is there and not suspended.

    Pods and Jobs come by two watches: a pod may be known before its Job, and long after it.
    """

    def __init__(self, *, is_evidence: Callable[[PodRecord], bool], on_change: Callable[[str], None]):
        super().__init__(parse_pod, on_change=on_change)
        self._is_evidence = is_evidence
        self._owners: dict[str, JobRecord] = {}
        self._gone_owners: OrderedDict[str, None] = OrderedDict()

    def of_job(self, job: JobIdentity) -> list[PodRecord]:
        """Return the pods that Jobs of this job control; others that carry its labels are not its."""
        with self._lock:
            return [pod for pod in super().of_job(job) if self._counts(pod)]

    def trust(self, owner: JobRecord) -> None:
        """Let pods of this Job count."""
        if owner.ours:
            with self._lock:
                self._owners.setdefault(owner.uid, owner)

    def remove(self, uid: str) -> None:
        """Keep the last words of a removed pod."""
        with self._lock:
            record = self._records.get(uid)
            if record is None or not (self._counts(record) and self._is_evidence(record)):
                super().remove(uid)
                return
            if record.gone:
                return
            self._records[uid] = bury(record, at=time.time())
        self._on_change(key_of(record.namespace, record.job))

    def forget_remains(self, owner: JobRecord) -> None:
        """Drop what is left of removed pods of a Job."""
        with self._lock:
            for record in self._claiming(_claimed_job(owner)):
                if record.owner_uid == owner.uid and record.gone:
                    _remember(self._removed, record.uid)
                    self._drop(record)

    def lose(self, owner: JobRecord) -> None:
        """Take in that a Job is gone; pods of it that still run count on, also those that are yet to be heard of."""
        with self._lock:
            self.forget_remains(owner)
            if owner.uid not in self._owners:
                return
            self._gone_owners[owner.uid] = None
            if len(self._gone_owners) > _TOMBSTONES:
                idle = next((uid for uid in self._gone_owners if not self._has_pods(self._owners[uid])), None)
                if idle is not None:
                    del self._gone_owners[idle], self._owners[idle]

    def _has_pods(self, owner: JobRecord) -> bool:
        return any(pod.owner_uid == owner.uid for pod in self._claiming(_claimed_job(owner)))

    def _counts(self, pod: PodRecord) -> bool:
        owner = self._owners.get(pod.owner_uid)
        if owner is not None:
            return _claimed_job(owner) == _claimed_job(pod)
        return self._outlives_unknown_job(pod)

    def _outlives_unknown_job(self, pod: PodRecord) -> bool:
        """Is it on its way out after a Job that went before this process began? Nothing may start beside it."""
        if not (pod.owner_uid and pod.deleting and pod.alive):
            return False
        return not any(
            _claimed_job(owner) == _claimed_job(pod) and owner.attempt == pod.attempt for owner in self._owners.values()
        )


class ChildJobCache(RecordCache[JobRecord]):
    """Jobs; with one that is removed or suspended (Kueue takes its pods, no fault of theirs), the remains go too."""

    def __init__(self, *, pods: Callable[[], PodCache], on_change: Callable[[str], None]):
        super().__init__(parse_job, on_change=on_change)
        self._pods = pods

    def put(self, document: Document) -> None:
        """Keep what is newer."""
        record = self._parse(document)
        self._pods().trust(record)  # first: who hears of the Job finds its pods
        super().put(document)
        if record.suspended:
            self._pods().forget_remains(record)

    def remove(self, uid: str) -> None:
        """Forget a deleted Job and what was left of its pods."""
        with self._lock:
            record = self._records.get(uid)
        super().remove(uid)
        if record is not None:
            self._pods().lose(record)

    def has(self, job: JobIdentity, *, attempt: int) -> bool:
        """Is our Job of this attempt there?"""
        return any(child.ours and child.attempt == attempt for child in self.of_job(job))

    def keeps_remains(self, pod: PodRecord) -> bool:
        """Is a removed pod of any interest?"""
        with self._lock:
            owner = self._records.get(pod.owner_uid)
        return owner is not None and not owner.suspended


class Children:
    """Both caches of children, wired."""

    def __init__(self, *, on_change: Callable[[str], None]):
        self.jobs = ChildJobCache(pods=lambda: self.pods, on_change=on_change)
        self.pods = PodCache(is_evidence=self.jobs.keeps_remains, on_change=on_change)


def _claimed_job(record: ChildRecord) -> tuple[str, str]:
    return record.namespace, record.job_uid


def _remember(removed: OrderedDict[str, None], uid: str) -> None:
    removed[uid] = None
    while len(removed) > _TOMBSTONES:
        removed.popitem(last=False)
