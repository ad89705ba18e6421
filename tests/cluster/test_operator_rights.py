"""The operator works with the rights that docs/operator-rbac.yaml gives it, and tries nothing beyond them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.cluster.cluster import Cluster, wait_until
from tests.cluster.control_plane import ROOT, write_kubeconfig
from tests.cluster.jobs import scripted_job, submit
from tests.cluster.operators import Operator

from ctj_api import names

RIGHTS = ROOT / "docs" / "operator-rbac.yaml"
ACCOUNT = "ctj-operator"


def grant(cluster: Cluster, namespace: str) -> Path:
    """Apply the rights for one namespace, and return a kubeconfig of the service account."""
    documents = list(yaml.safe_load_all(RIGHTS.read_text()))
    for document in documents:
        if document["kind"] == "ClusterRoleBinding":
            document["kind"] = "RoleBinding"  # as the file says, for an operator of one namespace
        for subject in document.get("subjects", []):
            subject["namespace"] = namespace
        if document["kind"] != "ClusterRole":
            document["metadata"]["namespace"] = namespace
    cluster.plane.apply(*documents)
    token = cluster.plane.kubectl("-n", namespace, "create", "token", ACCOUNT).strip()
    file = cluster.plane.directory / f"{namespace}-{ACCOUNT}.kubeconfig"
    write_kubeconfig(file, url=cluster.plane.url, authority=cluster.plane.directory / "api.crt", token=token)
    return file


@pytest.fixture
def restricted(cluster: Cluster, namespace: str) -> Iterator[Operator]:
    """Return a running operator that has only its own rights."""
    one = Operator(cluster, namespace, grant(cluster, namespace))
    one.start()
    try:
        yield one
    finally:
        if one.running is not None:
            one.stop()


def test_every_part_of_a_jobs_life_works_with_the_least_rights(
    cluster: Cluster, namespace: str, restricted: Operator
) -> None:
    ladder = [{"name": "only", "strategy": "ddp", "nodes": 2}]
    training = {"steps": 10_000, "globalBatchSize": 8, "microBatchSize": 4}
    job = submit(cluster, namespace, scripted_job("two", ladder=ladder, training=training))
    job.wait_for_pod()
    job.patch({"suspend": True})  # control annotation, then the Job and its Service go
    job.wait_for_phase("Suspended")
    wait_until("the Service to go", lambda: not cluster.plane.read(f"/api/v1/namespaces/{namespace}/services")["items"])

    submit(cluster, namespace, scripted_job("short", ttlSecondsAfterFinished=1))
    jobs = f"/apis/{names.API_VERSION}/namespaces/{namespace}/{names.PLURAL}"
    wait_until("its end by time to live", lambda: len(cluster.plane.read(jobs)["items"]) == 1)

    cluster.plane.kubectl("-n", namespace, "create", "job", "taken-only-1", "--image=none", "--", "true")
    taken = submit(cluster, namespace, scripted_job("taken"))
    wait_until("the taken name", lambda: "NameTaken" in str(taken.status()))

    events = cluster.plane.read(f"/api/v1/namespaces/{namespace}/events")["items"]
    assert {event["involvedObject"]["name"] for event in events} >= {"two", "short"}
    assert restricted.stop() == 0
    denied = [entry for entry in cluster.plane.audit() if _is_denied(entry, namespace)]
    assert denied == []
    assert "forbidden" not in restricted.log


def _is_denied(entry: dict[str, object], namespace: str) -> bool:
    user, response = entry["user"], entry.get("responseStatus")
    assert isinstance(user, dict)
    by_us = user["username"] == f"system:serviceaccount:{namespace}:{ACCOUNT}"
    return by_us and isinstance(response, dict) and response.get("code") == 403
