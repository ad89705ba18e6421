"""A job's life on a real API server: it ends once, and every end is final."""

from tests.cluster.cluster import Cluster, wait_until
from tests.cluster.jobs import scripted_job, submit
from tests.cluster.operators import Operator

from ctj_api import names


def two_stages() -> list[dict[str, object]]:
    return [{"name": "first", "strategy": "single", "steps": 4}, {"name": "second", "strategy": "ddp"}]


def test_a_two_stage_job_succeeds_and_can_be_followed(cluster: Cluster, namespace: str, operator: Operator) -> None:
    job = submit(cluster, namespace, scripted_job("ladder", steps=8, ladder=two_stages()))
    status = job.wait_for("Succeeded")
    assert [(stage["name"], stage["phase"]) for stage in status["ladder"]] == [
        ("first", "Passed"),
        ("second", "Passed"),
    ]
    assert [child["metadata"]["name"] for child in job.children()] == ["ladder-first-1", "ladder-second-2"]
    assert job.attempts_alive_together() == []
    printed = cluster.plane.kubectl("-n", namespace, "get", names.SHORT_NAME)
    assert "Succeeded" in printed
    assert "second" in printed
    events = cluster.plane.kubectl("-n", namespace, "events", "--for", f"{names.KIND}/ladder")
    assert "first" in events
    assert "second" in events


def test_success_survives_the_clean_up_of_its_jobs_and_a_restart(
    cluster: Cluster, namespace: str, operator: Operator
) -> None:
    """C45: a Job removed by its time to live must not be made again."""
    job = submit(cluster, namespace, scripted_job("done"))
    job.wait_for("Succeeded")
    cluster.plane.kubectl(
        *("-n", namespace, "patch", "job", "done-only-1", "--type=merge"),
        *("-p", '{"spec":{"ttlSecondsAfterFinished":1}}'),
    )
    wait_until("the Job's removal", lambda: not job.children(), seconds=20)
    operator.stop()
    operator.start()
    cluster.plane.kubectl("-n", namespace, "annotate", names.PLURAL, "done", "looked-at=again")
    wait_until("a second look", lambda: operator.log.count("lease_namespace=") >= 2)
    submit(cluster, namespace, scripted_job("later")).wait_for("Succeeded")  # so it has seen everything by now
    assert job.status()["phase"] == "Succeeded"
    created = [entry["objectRef"]["name"] for entry in job.writes("create", "jobs")]
    assert created == ["done-only-1", "later-only-1"]


def test_a_finished_job_goes_after_its_own_time_to_live(cluster: Cluster, namespace: str, operator: Operator) -> None:
    job = submit(cluster, namespace, scripted_job("short", ttlSecondsAfterFinished=2))
    wait_until("a child", job.children)
    wait_until(
        "the removal of job and children",
        lambda: not cluster.plane.kubectl("-n", namespace, "get", names.PLURAL, "-o", "name") and not job.children(),
        seconds=30,
    )
    assert len(list(job.writes("create", "jobs"))) == 1


def test_deleting_the_job_ends_its_pods(cluster: Cluster, namespace: str, operator: Operator) -> None:
    job = submit(cluster, namespace, scripted_job("going", steps=10_000))
    job.wait_for_pod()
    cluster.plane.kubectl("-n", namespace, "delete", names.PLURAL, "going")
    wait_until("its pods to go", lambda: not cluster.pods(namespace))
    assert len(list(job.writes("create", "jobs"))) == 1
