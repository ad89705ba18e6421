"""C47: suspend, resume and edits of a running job, without a single write that the API server refuses."""

from typing import Any

from tests.cluster.cluster import Cluster, wait_until
from tests.cluster.jobs import TrainingJob, refused, scripted_job, submit
from tests.cluster.operators import Operator

from ctj_api import names

LONG = {"stepSeconds": 0.1}


def attempts(job: TrainingJob) -> list[str]:
    return [child["metadata"]["name"] for child in job.children()]


def container(job: TrainingJob, child: int) -> dict[str, Any]:
    return dict(job.children()[child]["spec"]["template"]["spec"]["containers"][0])


def test_suspend_resume_image_and_label(cluster: Cluster, namespace: str, operator: Operator) -> None:
    job = submit(cluster, namespace, scripted_job("edited", steps=10_000, script=LONG))
    first = job.wait_for_pod()
    wait_until("some steps", lambda: len(list(job.checkpoints().glob("attempt-00001/*"))) > 3)

    job.patch({"suspend": True})
    job.wait_for_phase("Suspended")
    assert not job.live_pods()
    reached = len(list(job.checkpoints().glob("attempt-00001/*")))

    job.patch({"suspend": False})
    second = job.wait_for_pod(but=first)
    wait_until("steps of the second", lambda: list(job.checkpoints().glob("attempt-00002/*")))
    resumed = min(path.name for path in job.checkpoints().glob("attempt-00002/*"))
    assert resumed == f"step-{reached + 1:08d}"
    assert job.status()["restarts"]["failures"] == 0

    job.patch({"image": "test/scripted:2"})
    third = job.wait_for_pod(but=second)
    assert container(job, -1)["image"] == "test/scripted:2"
    assert attempts(job)[-1] == "edited-only-3"

    cluster.plane.kubectl("-n", namespace, "label", names.PLURAL, "edited", "team=research")
    cluster.plane.kubectl("-n", namespace, "label", names.PLURAL, "edited", f"{names.GROUP}/note=mine")
    other = submit(cluster, namespace, scripted_job("other"))
    other.wait_for("Succeeded")  # by now the label's event has been handled
    assert [pod["metadata"]["name"] for pod in job.live_pods()] == [third]

    assert job.attempts_alive_together() == []
    assert refused(job) == []
