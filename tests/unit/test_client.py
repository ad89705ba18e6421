"""What the API server's answers become, and what is sent to it."""

import socket
from typing import Any

import pytest
from tests.unit.api_stand_in import Answer, api
from tests.unit.cluster_objects import job_object

from ctj_operator.cluster.api_errors import (
    AlreadyExists,
    ApiError,
    Gone,
    LeadershipLost,
    NotFound,
    Refused,
    Stale,
    Unavailable,
    translate,
)
from ctj_operator.cluster.client import JOBS, PODS, TRAINING_JOBS, ApiClient, Credentials

Document = dict[str, Any]


def status(code: int, reason: str, message: str = "so it is") -> Answer:
    return Answer(status=code, body={"kind": "Status", "code": code, "reason": reason, "message": message})


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (status(404, "NotFound"), NotFound),
        (status(409, "AlreadyExists"), AlreadyExists),
        (status(409, "Conflict"), Stale),
        (status(410, "Expired"), Gone),
        (status(422, "Invalid"), Refused),
        (status(403, "Forbidden"), Refused),
        (status(500, "InternalError"), Unavailable),
        (status(503, "ServiceUnavailable"), Unavailable),
    ],
)
def test_every_answer_has_one_meaning(answer: Answer, expected: type[ApiError]) -> None:
    with api(answer) as server, pytest.raises(expected, match="so it is") as caught:
        server.client().create(JOBS, job_object())
    assert type(caught.value) is expected
    assert caught.value.status == answer.status


def test_an_overloaded_server_says_how_long_to_wait() -> None:
    answer = Answer(status=429, headers={"Retry-After": "7"}, body={"message": "too many requests"})
    with api(answer) as server, pytest.raises(Unavailable) as caught:
        server.client().get(PODS, namespace="a", name="b")
    assert caught.value.retry_after == 7.0


def test_an_answer_of_a_proxy_in_between_is_shown_as_it_is() -> None:
    error = translate(502, b"<html>Bad Gateway</html>")
    assert isinstance(error, Unavailable)
    assert "Bad Gateway" in str(error)


def test_a_server_that_is_not_there_is_unavailable() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        credentials = Credentials(
            server=url, ca_file=None, certificate_file=None, key_file=None, verify=True, token=lambda: None
        )
        seen: list[tuple[Any, ...]] = []
        client = ApiClient(credentials, observe_request=lambda *what: seen.append(what))
        with pytest.raises(Unavailable):
            client.get(PODS, namespace="a", name="b")
    assert seen[0][:3] == ("get", "pods", 0)


def test_paths_name_group_namespace_and_subresource() -> None:
    document = {"metadata": {"namespace": "a", "name": "b", "resourceVersion": "5"}}
    with api(Answer(), Answer(), Answer(body={"items": [], "metadata": {"resourceVersion": "1"}})) as server:
        client = server.client()
        client.replace(TRAINING_JOBS, document, subresource="status")
        client.get(PODS, namespace="a", name="b")
        client.list(JOBS, namespace=None)
    assert [(request.method, request.path) for request in server.requests] == [
        ("PUT", "/apis/training.ctj.dev/v1alpha1/namespaces/a/compiledtrainingjobs/b/status"),
        ("GET", "/api/v1/namespaces/a/pods/b"),
        ("GET", "/apis/batch/v1/jobs"),
    ]
    assert server.requests[0].headers["Authorization"] == "Bearer secret"


def test_a_delete_names_the_very_object() -> None:
    with api(Answer(), Answer()) as server:
        server.client().delete(JOBS, namespace="a", name="b", uid="u", wait_for_dependents=True)
        server.client().delete(JOBS, namespace="a", name="b", uid="u", wait_for_dependents=False)
    assert [request.body for request in server.requests] == [
        {"preconditions": {"uid": "u"}, "propagationPolicy": "Foreground"},
        {"preconditions": {"uid": "u"}, "propagationPolicy": "Background"},
    ]


def test_a_merge_is_sent_as_one() -> None:
    with api(Answer()) as server:
        server.client().merge(PODS, {"metadata": {"annotations": {"k": "v"}}}, namespace="a", name="b")
    assert server.requests[0].headers["Content-Type"] == "application/merge-patch+json"


def test_a_long_listing_is_read_page_by_page() -> None:
    first = Answer(body={"items": [{"n": 1}], "metadata": {"resourceVersion": "3", "continue": "more"}})
    second = Answer(body={"items": [{"n": 2}], "metadata": {"resourceVersion": "3"}})
    with api(first, second) as server:
        assert server.client().list(JOBS, namespace="a", selector="x") == ([{"n": 1}, {"n": 2}], "3")
    assert [request.query.get("continue") for request in server.requests] == [None, "more"]
    assert {request.query["labelSelector"] for request in server.requests} == {"x"}


def test_who_does_not_lead_reads_but_sends_no_write() -> None:
    with api(Answer()) as server:
        client = server.client(may_write=lambda: False)
        client.get(PODS, namespace="a", name="b")
        with pytest.raises(LeadershipLost):
            client.create(JOBS, job_object())
    assert [request.method for request in server.requests] == ["GET"]
