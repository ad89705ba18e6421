"""Events are best effort: a server that takes none holds up nobody."""

import threading
import time

import pytest
from tests.unit.cluster_objects import JOB

from ctj_operator.cluster import events
from ctj_operator.cluster.client import ApiClient, Resource
from ctj_operator.cluster.events import EventPoster
from ctj_operator.core.decision import Event, EventType


class SilentClient(ApiClient):
    """Takes a request and does not answer until it is let go."""

    def __init__(self) -> None:
        self.asked, self.released = threading.Event(), threading.Event()
        self.created: list[str] = []

    def create(self, resource: Resource, document: dict[str, object]) -> dict[str, object]:
        del resource
        self.asked.set()
        self.released.wait()
        self.created.append(str(document["reason"]))
        return document


def event(reason: str) -> Event:
    return Event(type=EventType.NORMAL, reason=reason, message="it happened")


def test_stopping_takes_no_longer_than_allowed_though_the_queue_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_WAITING", 1)
    client = SilentClient()
    poster = EventPoster(client, instance="test")
    poster.start()
    poster.post(JOB, event("First"), once_per="1")
    client.asked.wait()
    poster.post(JOB, event("Second"), once_per="1")
    began = time.monotonic()
    stopping = threading.Thread(target=poster.stop, kwargs={"seconds": 0.2}, daemon=True)
    stopping.start()
    stopping.join(10.0)
    assert not stopping.is_alive()
    assert time.monotonic() - began >= 0.2
    client.released.set()
    poster.stop(seconds=10.0)
    assert client.created == ["First", "Second"]


def test_what_waits_is_posted_before_the_end() -> None:
    client = SilentClient()
    client.released.set()
    poster = EventPoster(client, instance="test")
    for reason in ("First", "Second"):
        poster.post(JOB, event(reason), once_per="1")
    poster.start()
    poster.stop(seconds=10.0)
    assert client.created == ["First", "Second"]
