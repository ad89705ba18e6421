"""How a cache follows the API server through listings, watches, breaks and lost versions."""

from collections.abc import Iterable
from typing import Any

import pytest
from tests.unit.api_stand_in import Answer, ApiStandIn, api
from tests.unit.cluster_objects import job_object

from ctj_operator.cluster.api_errors import Gone, Unavailable
from ctj_operator.cluster.client import JOBS
from ctj_operator.cluster.reflector import Reflector

Document = dict[str, Any]


class Heard:
    """Writes down what a cache is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def put(self, document: Document) -> None:
        self.told.append(("put", document["metadata"]["uid"]))

    def remove(self, uid: str) -> None:
        self.told.append(("remove", uid))

    def keep_only(self, uids: Iterable[str], *, version: int, namespace: str | None) -> None:
        self.told.append((f"keep of {namespace} at {version}", sorted(uids)))


class Enough(Exception):
    """Ends a reflector in a test, where it would pause."""


def follow(server: ApiStandIn, heard: Heard) -> tuple[Reflector, list[float]]:
    """Return a reflector that ends at its third pause."""
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise Enough

    return Reflector(server.client(), JOBS, namespace="research", cache=heard, pause=pause), pauses


def listing(*uids: str, version: int) -> Answer:
    return Answer(body={"items": [job_object(uid=uid) for uid in uids], "metadata": {"resourceVersion": str(version)}})


def watching(*events: tuple[str, str, int], broken: bool = False) -> Answer:
    lines = [{"type": kind, "object": job_object(uid=uid, version=version)} for kind, uid, version in events]
    return Answer(lines=lines, broken=broken)


def lost(code: int) -> Answer:
    return Answer(status=code, body={"code": code, "message": "too old"})


def lost_while_watching() -> Answer:
    return Answer(lines=[{"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}}])


def test_first_the_listing_then_every_event_in_order() -> None:
    heard = Heard()
    events = watching(("ADDED", "b", 11), ("MODIFIED", "a", 12), ("BOOKMARK", "", 15), ("DELETED", "b", 16))
    with api(listing("a", version=10), events) as server:
        reflector, _ = follow(server, heard)
        assert not reflector.synced.is_set()
        reflector.follow_once()
    assert reflector.synced.is_set()
    assert heard.told == [("put", "a"), ("keep of research at 10", ["a"]), ("put", "b"), ("put", "a"), ("remove", "b")]
    assert server.requests[1].query["resourceVersion"] == "10"
    assert server.requests[1].query["allowWatchBookmarks"] == "true"
    assert server.requests[1].query["labelSelector"] == "training.ctj.dev/job"


def test_the_next_watch_goes_on_from_the_last_event_without_a_listing() -> None:
    with api(listing(version=10), watching(("ADDED", "a", 11), ("BOOKMARK", "", 20)), watching()) as server:
        reflector, _ = follow(server, Heard())
        reflector.follow_once()
        reflector.follow_once()
    assert server.requests[2].query["resourceVersion"] == "20"


def test_a_watch_that_breaks_off_loses_no_whole_event() -> None:
    heard = Heard()
    with api(listing(version=10), watching(("ADDED", "a", 11), broken=True), watching()) as server:
        reflector, _ = follow(server, heard)
        with pytest.raises(Unavailable):
            reflector.follow_once()
        reflector.follow_once()
    assert ("put", "a") in heard.told
    assert server.requests[2].query["resourceVersion"] == "11"


@pytest.mark.parametrize("answer", [lost(410), lost_while_watching()], ids=["as status", "as event"])
def test_a_version_that_is_too_old_is_recognised(answer: Answer) -> None:
    with api(listing(version=10), answer) as server, pytest.raises(Gone):
        follow(server, Heard())[0].follow_once()


def test_after_a_lost_version_the_new_listing_is_compared_with_what_was_known() -> None:
    heard = Heard()
    answers = [listing("a", "b", version=10), lost(410), listing("a", version=50), lost(500), lost(500)]
    with api(*answers) as server:
        reflector, _ = follow(server, heard)
        with pytest.raises(Enough):
            reflector.follow()
    assert heard.told[-2:] == [("put", "a"), ("keep of research at 50", ["a"])]


def test_a_server_in_trouble_is_asked_less_and_less_often() -> None:
    with api(lost(500), lost(503), lost(500)) as server:
        reflector, pauses = follow(server, Heard())
        with pytest.raises(Enough):
            reflector.follow()
    assert [0.25 <= pauses[0] <= 0.5, 0.5 <= pauses[1] <= 1.0, 1.0 <= pauses[2] <= 2.0] == [True] * 3
    assert not reflector.synced.is_set()
