"""The operator may die before and after each of its writes: nothing is lost, done twice, or paid for twice."""

import os
import signal
import time

from tests.cluster.cluster import Cluster
from tests.cluster.jobs import TrainingJob, scripted_job, submit
from tests.cluster.operators import Operator
from tests.cluster.writes import deadly_api

LIMIT_SECONDS = 240


def run_through_every_death(operator: Operator, job: TrainingJob) -> int:
    """Start the operator again whenever it is dead, until the job is over; returns how often it died."""
    deaths, deadline = 0, time.monotonic() + LIMIT_SECONDS
    while job.status().get("phase") not in ("Succeeded", "Failed"):
        assert time.monotonic() < deadline, f"not over after {deaths} deaths: {job.status()}"
        if operator.running is not None and operator.running.poll() is not None:
            deaths += 1
            operator.kill()  # it is dead already; this takes its status
            operator.start()
        time.sleep(0.1)
    return deaths


def test_a_job_survives_the_operators_death_at_every_write(cluster: Cluster, namespace: str) -> None:
    operator = Operator(cluster, namespace, cluster.plane.kubeconfig)

    def kill() -> None:
        if operator.running is not None:
            os.kill(operator.running.pid, signal.SIGKILL)

    with deadly_api(cluster.plane, kill=kill) as (kubeconfig, met):
        operator.kubeconfig = kubeconfig
        ladder = [{"name": "first", "strategy": "single", "steps": 4}, {"name": "second", "strategy": "ddp"}]
        script = {"exits": {"2": 137}}
        job = submit(
            cluster,
            namespace,
            scripted_job("mortal", steps=8, ladder=ladder, script=script, restart={"maxFailures": 1}),
        )
        operator.start()
        try:
            deaths = run_through_every_death(operator, job)
        finally:
            if operator.running is not None:
                operator.kill()
    status = job.status()
    assert status["phase"] == "Succeeded"
    assert (status["attempt"], status["restarts"]["total"]) == (3, 1)
    assert [child["metadata"]["name"] for child in job.children()] == [
        "mortal-first-1",
        "mortal-second-2",
        "mortal-second-3",
    ]
    assert job.attempts_alive_together() == []
    assert deaths >= 2 * len([write for write in met if write.endswith("/jobs")])
    assert deaths >= 4
