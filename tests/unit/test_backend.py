"""What the cluster backend sends to the API server for a decision, and what it makes of the answers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
from tests.unit.api_stand_in import Answer, ApiStandIn, api
from tests.unit.cluster_objects import JOB_UID, attempt, job_object, pod_object

from ctj_api import names
from ctj_api.control import Control, StopControl
from ctj_api.status import Status
from ctj_operator.cluster.backend import ClusterBackend
from ctj_operator.cluster.caches import Children, JobCache
from ctj_operator.cluster.events import EventPoster
from ctj_operator.cluster.scrape import ProgressScraper
from ctj_operator.cluster.settings import Settings
from ctj_operator.cluster.surroundings import Surroundings
from ctj_operator.core.decision import Decision
from ctj_operator.core.observed import Observed
from ctj_operator.core.reconcile import Conflict

Document = dict[str, Any]
KEY = "research/llama"
PATH = "/namespaces/research"


def training_job(*, version: int = 5, **status: Any) -> Document:
    return {
        "metadata": {
            "namespace": "research",
            "name": "llama",
            "uid": JOB_UID,
            "resourceVersion": str(version),
            "generation": 1,
        },
        "spec": {"image": "team/llama:1", "ladder": [{"name": "full", "strategy": "ddp"}]},
        "status": {"attempt": 1, **status},
    }


def current(**changes: Any) -> Document:
    record = {"attempt": 1, "stage": "full", "mode": "Compiled", "microBatchSize": 1, "floorStep": 0, "generation": 1}
    return {**record, "recordedAt": "2026-01-01T00:00:00Z", "requestedAt": "2026-01-01T00:00:00Z", **changes}


def denied(code: int, reason: str = "") -> Answer:
    return Answer(status=code, body={"reason": reason, "message": "so it is"})


class Place:
    """A backend before a scripted API server."""

    def __init__(self, server: ApiStandIn) -> None:
        self.server = server
        self.jobs, self.children = JobCache(), Children(on_change=lambda _: None)
        self.looks: list[tuple[str, float]] = []
        self.stored: list[Status] = []
        client = server.client()
        self.backend = ClusterBackend(
            Surroundings(
                client=client,
                jobs=self.jobs,
                children=self.children,
                scraper=ProgressScraper(every_seconds=30, on_news=lambda _: None),
                poster=EventPoster(client, instance="test"),
                settings=Settings(checkpoint_claim="shared"),
                look_later=lambda key, seconds: self.looks.append((key, seconds)),
                on_record=lambda *change: self.stored.append(change[-1]),
            )
        )

    def observe(self) -> Observed:
        seen = self.backend.observe(KEY)
        assert seen is not None
        return seen

    @property
    def sent(self) -> list[tuple[str, str]]:
        return [(request.method, request.path.partition(PATH)[2]) for request in self.server.requests]


@contextmanager
def place(*answers: Answer, job: Document | None = None) -> Iterator[Place]:
    with api(*answers) as server:
        one = Place(server)
        one.jobs.put(job or training_job())
        yield one


def test_a_status_is_stored_over_the_version_that_was_observed_beside_what_others_keep_there() -> None:
    answer = Answer(body=training_job(version=6, attempt=2))
    with place(answer, job=training_job(intents={"alert": {}})) as here:
        here.backend.record(here.observe(), Decision(status=Status(attempt=2)))
        assert here.sent == [("PUT", "/compiledtrainingjobs/llama/status")]
        body = here.server.requests[0].body
        assert body["metadata"]["resourceVersion"] == "5"
        assert (body["status"]["attempt"], body["status"]["intents"]) == (2, {"alert": {}})
        assert here.observe().status.attempt == 2  # answered from what was written
        assert here.stored == [Status(attempt=2)]


def test_a_status_that_somebody_else_changed_is_read_again_and_not_overwritten() -> None:
    with place(denied(409, "Conflict"), Answer(body=training_job(version=9, attempt=7))) as here:
        with pytest.raises(Conflict):
            here.backend.record(here.observe(), Decision(status=Status(attempt=2)))
        assert here.observe().status.attempt == 7
        assert here.stored == []


def test_a_job_that_is_gone_is_forgotten_when_its_status_is_written() -> None:
    with place(denied(404), denied(404)) as here:
        with pytest.raises(Conflict):
            here.backend.record(here.observe(), Decision(status=Status(attempt=2)))
        assert here.backend.observe(KEY) is None


def test_a_created_child_is_known_before_any_watch_tells() -> None:
    with place(Answer(body=job_object())) as here:
        here.backend.apply(here.observe(), Decision(status=Status(attempt=1), create=attempt()))
        assert here.sent == [("POST", "/jobs")]
        assert [child.uid for child in here.observe().children] == ["job-1"]


def test_a_child_that_was_created_before_is_ours() -> None:
    with place(denied(409, "AlreadyExists"), Answer(body=job_object())) as here:
        here.backend.apply(here.observe(), Decision(status=Status(attempt=1), create=attempt()))
        assert [(child.uid, child.ours) for child in here.observe().children] == [("job-1", True)]


def test_a_name_that_somebody_else_has_is_reported_and_never_adopted() -> None:
    with place(denied(409, "AlreadyExists"), Answer(body=job_object(owner="somebody"))) as here:
        here.backend.apply(here.observe(), Decision(status=Status(attempt=1), create=attempt()))
        assert [(child.name, child.ours) for child in here.observe().children] == [("llama-full-1", False)]
        assert here.looks == [(KEY, 0.0)]


def test_several_pods_get_their_service_first_and_a_foreign_one_stops_the_job() -> None:
    several = attempt(stage={"nodes": 2})
    with place(Answer(body=job_object()), Answer(body=job_object())) as here:
        here.backend.apply(here.observe(), Decision(status=Status(attempt=1), create=several))
        assert here.sent == [("POST", "/services"), ("POST", "/jobs")]
    with place(denied(409, "AlreadyExists"), Answer(body=job_object(owner="somebody"))) as here:
        here.backend.apply(here.observe(), Decision(status=Status(attempt=1), create=several))
        assert ("POST", "/jobs") not in here.sent
        assert not here.observe().children[0].ours


def test_a_refused_child_is_reported_with_the_servers_sentence_until_it_is_accepted() -> None:
    decision = Decision(status=Status(attempt=1), create=attempt())
    with place(denied(403, "Forbidden"), Answer(body=job_object())) as here:
        here.backend.apply(here.observe(), decision)
        assert here.observe().create_error == "so it is"
        assert here.looks == [(KEY, 0.0)]
        here.backend.apply(here.observe(), decision)
        assert here.observe().create_error == ""


def test_what_only_a_person_can_give_is_asked_for_without_a_request() -> None:
    job = training_job()
    del job["spec"]["image"]
    with place(job=job) as here:
        here.backend.apply(here.observe(), Decision(status=Status(attempt=1), create=attempt()))
        assert "spec.image" in here.observe().create_error
        assert here.sent == []


def test_a_running_child_is_deleted_with_its_pods_and_only_this_very_one() -> None:
    with place(Answer()) as here:
        here.children.jobs.put(job_object())
        here.children.pods.put(pod_object())
        here.backend.apply(here.observe(), Decision(status=Status(attempt=2), delete=("job-1",)))
        (request,) = here.server.requests
        assert (request.method, request.body) == (
            "DELETE",
            {"preconditions": {"uid": "job-1"}, "propagationPolicy": "Foreground"},
        )


def test_what_is_not_ours_is_never_deleted() -> None:
    with place() as here:
        here.children.jobs.put(job_object(owner="somebody"))
        here.backend.apply(here.observe(), Decision(status=Status(attempt=2), delete=("job-1",)))
        assert here.sent == []


def test_without_a_write_of_this_pass_the_server_is_asked_before_anything_is_deleted() -> None:
    with place(Answer(body=training_job(version=8)), job=training_job()) as here:
        here.children.jobs.put(job_object())
        seen = here.observe()
        with pytest.raises(Conflict):
            here.backend.apply(seen, Decision(status=seen.status, delete=("job-1",)))
        assert [method for method, _ in here.sent] == ["GET"]


def test_a_child_that_vanished_is_asked_for_before_it_is_called_lost() -> None:
    job = training_job(current=current(childSeen=True))
    with place(Answer(body=job_object()), job=job) as here:
        assert [child.uid for child in here.observe().children] == ["job-1"]
        assert here.sent == [("GET", "/jobs/llama-full-1")]
    with place(denied(404), job=job) as here:
        assert here.observe().children == ()


def test_a_child_that_was_never_seen_costs_no_read() -> None:
    with place(job=training_job(current=current())) as here:
        assert here.observe().children == ()
        assert here.sent == []


def test_control_reaches_every_living_pod_of_its_attempt_once() -> None:
    control = Control(attempt=1, sequence=2, stop=StopControl.CHECKPOINT)
    steered = pod_object(version=20)
    steered["metadata"]["annotations"] = {names.ANNOTATION_CONTROL: control.model_dump_json(by_alias=True)}
    with place(Answer(body=steered)) as here:
        here.children.jobs.put(job_object())
        here.children.jobs.put(job_object(number=2))
        here.children.pods.put(pod_object())
        here.children.pods.put(pod_object(uid="ended", phase="Failed"))
        here.children.pods.put(pod_object(uid="other", number=2))
        here.children.pods.put(pod_object(uid="forged", owner="job-of-somebody"))
        for _ in range(2):
            here.backend.apply(here.observe(), Decision(status=Status(attempt=1), control=control))
        (request,) = here.server.requests
        assert request.body["metadata"]["uid"] == "pod-1"
        assert Control.model_validate_json(request.body["metadata"]["annotations"][names.ANNOTATION_CONTROL]) == control


def test_a_job_whose_time_is_over_is_deleted_by_uid() -> None:
    with place(Answer(body=training_job()), Answer()) as here:
        seen = here.observe()
        here.backend.apply(seen, Decision(status=seen.status, delete_job=True))
        assert here.sent == [("GET", "/compiledtrainingjobs/llama"), ("DELETE", "/compiledtrainingjobs/llama")]
        assert cast(Document, here.server.requests[1].body)["preconditions"] == {"uid": JOB_UID}
