"""Who leads? A coordination.k8s.io Lease: taken, renewed, handed back on stop; losing it means no more writes.

Other processes' clocks are not trusted: a lease counts as dead when *we* have seen it unchanged for its duration.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ctj_operator.cluster.api_errors import AlreadyExists, ApiError, NotFound, Stale
from ctj_operator.cluster.client import LEASES, ApiClient

Document = dict[str, Any]

# As client-go does: renew long before, and give up a good while before others may take over.
_RETRY_SHARE = 2 / 15
_GIVE_UP_SHARE = 10 / 15

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LeaseName:
    """Which lease, and as whom."""

    namespace: str
    name: str
    identity: str
    seconds: float


class Leadership:
    """One contender. `acquire` blocks until it leads; from then on a thread renews."""

    def __init__(self, client: ApiClient, lease: LeaseName, *, on_lost: Callable[[], None]):
        self._client = client
        self._lease = lease
        self._on_lost = on_lost
        self._renewed_at = float("-inf")
        self._seen: tuple[str, float] = ("", 0.0)
        self._mine: Document | None = None
        """The lease as this process last wrote it: renewing needs no read."""
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def is_held(self) -> bool:
        """May this process still write? True for less long than others wait."""
        return time.monotonic() - self._renewed_at < self._lease.seconds * _GIVE_UP_SHARE

    def acquire(self) -> None:
        """Wait until this process leads."""
        logger.info("waiting for lease %s/%s as %s", self._lease.namespace, self._lease.name, self._lease.identity)
        while not self._try():
            time.sleep(self._lease.seconds * _RETRY_SHARE)
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()
        logger.info("leading")

    def release(self) -> None:
        """Hand the lease back, so that the next leader need not wait for it to run out."""
        self._stopping.set()
        if self._thread is None or not self.is_held():
            return
        self._thread.join()
        try:
            stored = self._client.get(LEASES, namespace=self._lease.namespace, name=self._lease.name)
            if stored["spec"].get("holderIdentity") == self._lease.identity:
                stored["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                self._client.replace(LEASES, stored)
                logger.info("lease released")
        except ApiError as error:
            logger.warning("lease not released, the next leader waits for it to run out: %s", error)
        self._renewed_at = float("-inf")

    def _keep(self) -> None:
        while not self._stopping.wait(self._lease.seconds * _RETRY_SHARE):
            if not self._try() and not self.is_held():
                logger.error("lease lost")
                self._on_lost()
                return

    def _try(self) -> bool:
        started = time.monotonic()  # the lease runs from before the request, whatever the answer takes
        try:
            won = self._take()
        except ApiError as error:
            logger.warning("lease %s/%s: %s", self._lease.namespace, self._lease.name, error)
            return False
        if won:
            self._renewed_at = started
        return won

    def _take(self) -> bool:
        """Renew, or take what is free or dead; the version makes sure that one contender wins."""
        stored = self._mine or self._read()
        try:
            if stored is None:
                self._mine = self._client.create(LEASES, self._build())
            elif stored["spec"].get("holderIdentity") == self._lease.identity or self._is_free(stored):
                self._mine = self._client.replace(LEASES, self._renew(stored))
            else:
                return False
        except (AlreadyExists, Stale, NotFound):
            self._mine = None  # somebody else wrote it: look before the next try
            return False
        return True

    def _read(self) -> Document | None:
        try:
            return self._client.get(LEASES, namespace=self._lease.namespace, name=self._lease.name)
        except NotFound:
            return None

    def _is_free(self, stored: Document) -> bool:
        spec = stored["spec"]
        if not spec.get("holderIdentity"):
            return True
        version = stored["metadata"]["resourceVersion"]
        if self._seen[0] != version:
            self._seen = (version, time.monotonic())
        duration: float = spec.get("leaseDurationSeconds", self._lease.seconds)
        return time.monotonic() - self._seen[1] > duration

    def _build(self) -> Document:
        return {
            "apiVersion": LEASES.api_version,
            "kind": "Lease",
            "metadata": {"name": self._lease.name, "namespace": self._lease.namespace},
            "spec": {**self._claim(), "acquireTime": _now(), "leaseTransitions": 0},
        }

    def _renew(self, stored: Document) -> Document:
        spec = stored["spec"]
        if spec.get("holderIdentity") != self._lease.identity:
            spec = {**spec, "acquireTime": _now(), "leaseTransitions": spec.get("leaseTransitions", 0) + 1}
        return {**stored, "spec": {**spec, **self._claim()}}

    def _claim(self) -> Document:
        duration = max(1, round(self._lease.seconds))
        return {"holderIdentity": self._lease.identity, "leaseDurationSeconds": duration, "renewTime": _now()}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
