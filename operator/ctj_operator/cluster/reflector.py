"""How a cache follows one kind of child: list, then watch, for ever. Only tells the cache; never decides anything.

A relist is compared with what is known, so a deletion that was missed is found; a broken watch goes on from its last
version; a dead peer is noticed by silence (bookmarks come every minute); back-off has jitter.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from ctj_api import names
from ctj_operator.cluster.api_errors import ApiError, Gone
from ctj_operator.cluster.client import ApiClient, Resource

Document = dict[str, Any]

_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0

logger = logging.getLogger(__name__)


class Cache(Protocol):
    """Where a reflector puts what it hears."""

    def put(self, document: Document) -> None:
        """Take in an object that was listed, added or changed."""

    def remove(self, uid: str) -> None:
        """Take in that an object is gone."""

    def keep_only(self, uids: Iterable[str], *, version: int, namespace: str | None) -> None:
        """Take in that of `namespace` (None: everywhere) only these were left at `version`."""


class Reflector:
    """One list-and-watch loop, in a thread of its own, over the objects that carry our label."""

    def __init__(
        self,
        client: ApiClient,
        resource: Resource,
        *,
        namespace: str | None,
        cache: Cache,
        pause: Callable[[float], None] = time.sleep,
    ):
        self._client = client
        self.resource = resource
        self._namespace = namespace
        self._cache = cache
        self._pause = pause
        self._version: str | None = None
        self._thread = threading.Thread(target=self.follow, name=f"watch {resource.plural}", daemon=True)
        self.synced = threading.Event()
        """Set once the first listing is in the cache."""
        self.heard_at = 0.0
        """Monotonic time of the last sign of life from the server."""

    def start(self) -> None:
        """Follow in a daemon thread: it sits in a read for most of its life and dies with the process."""
        self._thread.start()

    def is_alive(self) -> bool:
        """False if a bug has ended it: what is known grows old."""
        return self._thread.is_alive()

    def follow(self) -> None:
        """Follow for ever."""
        failures = 0
        while True:
            heard_before = self.heard_at
            try:
                self.follow_once()
                continue
            except Gone as error:
                logger.info("watch of %s: %s; listing again", self.resource.plural, error)
                self._version = None
            except ApiError as error:
                logger.warning("watch of %s: %s", self.resource.plural, error)
            failures = 1 if self.heard_at > heard_before else failures + 1
            longest = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** (failures - 1))
            self._pause(random.uniform(longest / 2, longest))

    def follow_once(self) -> None:
        """List if needed, then watch until the server ends it.

        Raises:
            ApiError: the server does not answer as it should; what is known stays.
        """
        if self._version is None:
            self._list()
        assert self._version is not None
        events = self._client.watch(
            self.resource, namespace=self._namespace, version=self._version, selector=names.LABEL_JOB
        )
        for kind, document in events:
            self.heard_at = time.monotonic()
            if kind == "DELETED":
                self._cache.remove(document["metadata"]["uid"])
            elif kind != "BOOKMARK":
                self._cache.put(document)
            self._version = document["metadata"]["resourceVersion"]

    def _list(self) -> None:
        documents, self._version = self._client.list(self.resource, namespace=self._namespace, selector=names.LABEL_JOB)
        self.heard_at = time.monotonic()
        for document in documents:
            self._cache.put(document)
        uids = [document["metadata"]["uid"] for document in documents]
        self._cache.keep_only(uids, version=int(self._version), namespace=self._namespace)
        self.synced.set()
