"""C49: retries are counted in status, permanent errors are not retried, disruptions have a budget of their own."""

from typing import Any

from tests.cluster.cluster import Cluster, wait_until
from tests.cluster.jobs import scripted_job, submit
from tests.cluster.operators import Operator


def failed(status: dict[str, Any]) -> dict[str, Any]:
    (condition,) = (one for one in status["conditions"] if one["type"] == "Failed")
    assert condition["status"] == "True"
    return dict(condition)


def test_a_retryable_exit_is_retried_up_to_the_limit(cluster: Cluster, namespace: str, operator: Operator) -> None:
    script = {"exits": {"default": 137}}
    job = submit(cluster, namespace, scripted_job("killed", script=script, restart={"maxFailures": 2}))
    status = job.wait_for("Failed")
    assert failed(status)["reason"] == "RetryLimit"
    assert status["attempt"] == 3
    assert [entry["objectRef"]["name"] for entry in job.writes("create", "jobs")] == [
        "killed-only-1",
        "killed-only-2",
        "killed-only-3",
    ]
    assert status["firstFailure"]["exitCode"] == 137


def test_attempts_survive_a_restart_of_the_operator_and_the_deletion_of_pods(
    cluster: Cluster, namespace: str, operator: Operator
) -> None:
    script = {"exits": {"1": 137, "3": 137}, "stepSeconds": 0.1}
    document = scripted_job("counted", steps=10_000, script=script, restart={"maxFailures": 1})
    job = submit(cluster, namespace, document)
    wait_until("the second attempt", lambda: list(job.checkpoints().glob("attempt-00002/*")))
    operator.stop()
    cluster.plane.kubectl("-n", namespace, "delete", "pods", "--all", "--wait=false")
    operator.start()
    status = job.wait_for("Failed")  # the third attempt fails again; the deleted pod was a disruption
    assert (status["attempt"], status["restarts"]["failures"], status["restarts"]["disruptions"]) == (3, 1, 1)


def test_a_permanent_exit_ends_the_job_at_once_and_is_shown(
    cluster: Cluster, namespace: str, operator: Operator
) -> None:
    job = submit(cluster, namespace, scripted_job("broken", script={"exits": {"default": 1}}))
    status = job.wait_for("Failed")
    assert status["attempt"] == 1
    assert status["firstFailure"]["exitCode"] == 1
    assert "1" in failed(status)["message"]
    assert len(job.children()) == 1


def test_an_eviction_is_not_a_failure(cluster: Cluster, namespace: str, operator: Operator) -> None:
    document = scripted_job("drained", steps=40, script={"stepSeconds": 0.05}, restart={"maxFailures": 0})
    job = submit(cluster, namespace, document)
    first = job.wait_for_pod()
    cluster.evict(namespace, first)
    status = job.wait_for("Succeeded")
    assert status["attempt"] == 2
    assert (status["restarts"]["failures"], status["restarts"]["total"]) == (0, 1)
    assert job.attempts_alive_together() == []
