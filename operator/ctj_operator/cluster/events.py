"""Posts what happened as Kubernetes Events: best effort, off the reconcile path, never the only record of anything."""

import hashlib
import logging
import queue
import threading
import time
from datetime import UTC, datetime
from typing import Any

from ctj_api import names
from ctj_api.attempt import JobIdentity
from ctj_operator.cluster.api_errors import AlreadyExists, ApiError, LeadershipLost
from ctj_operator.cluster.client import EVENTS, ApiClient
from ctj_operator.core.decision import Event

_WAITING = 10_000  # more than this at once is a flood that nobody reads
_MAX_MESSAGE = 1024  # the API's limit
_COMPONENT = "ctj-operator"

logger = logging.getLogger(__name__)


class EventPoster:
    """A queue and a thread."""

    def __init__(self, client: ApiClient, *, instance: str):
        self._client = client
        self._instance = instance
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(maxsize=_WAITING)
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def start(self) -> None:
        """Post from a daemon thread."""
        self._thread.start()

    def stop(self, *, seconds: float) -> None:
        """Post what waits, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        if self._thread.is_alive():
            try:
                self._waiting.put(None, timeout=seconds)
            except queue.Full:
                return  # nothing was posted in all that time: the server is slow or gone
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def post(self, job: JobIdentity, event: Event, *, once_per: str) -> None:
        """Queue one event; the same event with the same `once_per` is posted once, whoever repeats it."""
        try:
            self._waiting.put_nowait(build_event(job, event, instance=self._instance, once_per=once_per))
        except queue.Full:
            logger.warning("%s/%s: event %s dropped, %s are waiting", job.namespace, job.name, event.reason, _WAITING)

    def _run(self) -> None:
        while (document := self._waiting.get()) is not None:
            try:
                self._client.create(EVENTS, document)
            except AlreadyExists:
                continue
            except (ApiError, LeadershipLost) as error:
                logger.warning("event %s not posted: %s", document["metadata"]["name"], error)


def build_event(job: JobIdentity, event: Event, *, instance: str, once_per: str) -> dict[str, Any]:
    """Build the document; its name is a digest, so that posting it twice ends the same."""
    digest = hashlib.sha256("\n".join((job.uid, once_per, event.reason, event.message)).encode()).hexdigest()[:16]
    now = datetime.now(UTC)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{job.name}.{digest}", "namespace": job.namespace},
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "namespace": job.namespace,
            "name": job.name,
            "uid": job.uid,
        },
        "type": event.type.value,
        "reason": event.reason,
        "message": event.message[:_MAX_MESSAGE],
        "action": "Reconcile",
        "eventTime": now.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "firstTimestamp": now.isoformat(timespec="seconds").replace("+00:00", "Z"),
        "lastTimestamp": now.isoformat(timespec="seconds").replace("+00:00", "Z"),
        "count": 1,
        "reportingComponent": _COMPONENT,
        "reportingInstance": instance[:128],
        "source": {"component": _COMPONENT},
    }
