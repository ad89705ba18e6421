"""Who leads, and what becomes of it when a leader stops, dies or loses touch."""

import copy
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from ctj_operator.cluster.api_errors import AlreadyExists, NotFound, Stale, Unavailable
from ctj_operator.cluster.client import ApiClient
from ctj_operator.cluster.lease import Leadership, LeaseName

Document = dict[str, Any]


class Leases:
    """One stored lease with versions, as the API server keeps it."""

    def __init__(self) -> None:
        self.stored: Document | None = None
        self.version = 0
        self.reachable = True
        self.lock = threading.Lock()

    def get(self, *_: Any, **__: Any) -> Document:
        self._check()
        if self.stored is None:
            raise NotFound("no lease")
        return copy.deepcopy(self.stored)

    def create(self, _: Any, document: Document) -> Document:
        with self.lock:
            self._check()
            if self.stored is not None:
                raise AlreadyExists("taken")
            return self._store(document)

    def replace(self, _: Any, document: Document) -> Document:
        with self.lock:
            self._check()
            if document["metadata"]["resourceVersion"] != str(self.version):
                raise Stale("changed")
            return self._store(document)

    @property
    def holder(self) -> str:
        assert self.stored is not None
        return str(self.stored["spec"]["holderIdentity"])

    def _check(self) -> None:
        if not self.reachable:
            raise Unavailable("no answer")

    def _store(self, document: Document) -> Document:
        self.version += 1
        self.stored = copy.deepcopy(document)
        self.stored["metadata"]["resourceVersion"] = str(self.version)
        return self.stored


@pytest.fixture
def leases() -> Leases:
    return Leases()


def contender(leases: Leases, identity: str, *, on_lost: Callable[[], None] = lambda: None) -> Leadership:
    lease = LeaseName(namespace="a", name="b", identity=identity, seconds=0.6)
    return Leadership(cast(ApiClient, leases), lease, on_lost=on_lost)


def test_the_first_leads_until_it_hands_over(leases: Leases) -> None:
    first, second = contender(leases, "first"), contender(leases, "second")
    first.acquire()
    waiting = threading.Thread(target=second.acquire)
    waiting.start()
    time.sleep(1.2)  # longer than the lease: it is renewed
    assert (first.is_held(), second.is_held(), leases.holder) == (True, False, "first")
    handed_over = time.monotonic()
    first.release()
    waiting.join(5)
    assert time.monotonic() - handed_over < 0.5
    assert (first.is_held(), second.is_held(), leases.holder) == (False, True, "second")
    second.release()
    assert leases.holder == ""


def test_a_dead_leader_is_replaced_when_its_lease_has_stood_still_for_its_duration(leases: Leases) -> None:
    leases.create(None, {"metadata": {}, "spec": {"holderIdentity": "dead", "leaseDurationSeconds": 1}})
    second = contender(leases, "second")
    started = time.monotonic()
    second.acquire()
    assert time.monotonic() - started >= 1.0
    second.release()


def test_a_leader_without_the_server_stops_leading_before_others_may_start(leases: Leases) -> None:
    lost = threading.Event()
    leader = contender(leases, "leader", on_lost=lost.set)
    leader.acquire()
    leases.reachable = False
    assert lost.wait(0.6)
    assert not leader.is_held()
    assert leases.holder == "leader"


def test_a_leader_that_was_replaced_does_not_take_the_lease_back(leases: Leases) -> None:
    lost = threading.Event()
    leader = contender(leases, "leader", on_lost=lost.set)
    leader.acquire()
    assert leases.stored is not None
    thief = copy.deepcopy(leases.stored)
    thief["spec"] |= {"holderIdentity": "other", "leaseDurationSeconds": 60}
    leases.replace(None, thief)
    assert lost.wait(2.0)
    leader.release()
    assert leases.holder == "other"
