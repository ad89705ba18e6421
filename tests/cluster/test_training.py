"""Real training through the operator: several pods that meet by their Service's names."""

from tests.cluster.cluster import Cluster
from tests.cluster.jobs import small_job, submit
from tests.cluster.operators import Operator


def test_two_pods_train_one_stage_together(cluster: Cluster, namespace: str, operator: Operator) -> None:
    job = submit(cluster, namespace, small_job("pair", steps=16, canary=8, nodes=2))
    status = job.wait_for("Succeeded", seconds=400)
    assert [stage["phase"] for stage in status["ladder"]] == ["Passed", "Passed"]
    pods = [pod["metadata"]["name"].rsplit("-", 1)[0] for pod in cluster.pods(namespace)]
    assert sorted(pods) == ["pair-one-1-0", "pair-two-2-0", "pair-two-2-1"]
    services = [entry["objectRef"]["name"] for entry in job.writes("create", "services")]
    assert services == ["pair-two-2"]
    parity = next(gate for gate in status["ladder"][1]["gates"] if gate["name"] == "parity")
    assert parity["verdict"] == "Passed"
