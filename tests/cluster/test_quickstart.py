"""`kubectl apply -f examples/quickstart.yaml` trains through all four stages on a real API server."""

import json
from pathlib import Path

import pytest
import yaml
from tests.cluster.cluster import Cluster
from tests.cluster.jobs import TrainingJob
from tests.cluster.operators import Operator

from ctj_api import names

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.yaml"


@pytest.mark.timeout(1500)
def test_apply_and_wait_for_succeeded(cluster: Cluster, namespace: str, operator: Operator) -> None:
    cluster.plane.kubectl("-n", namespace, "apply", "-f", str(QUICKSTART))
    job = TrainingJob(cluster, namespace, "quickstart")
    status = job.wait_for("Succeeded", seconds=1200)
    cluster.plane.kubectl("-n", namespace, "wait", "--for=condition=Succeeded", "--timeout=5s", "ctj/quickstart")

    wanted = [stage["name"] for stage in yaml.safe_load(QUICKSTART.read_text())["spec"]["ladder"]]
    assert [(stage["name"], stage["phase"], stage["mode"]) for stage in status["ladder"]] == [
        (name, "Passed", "Compiled") for name in wanted
    ]
    assert status["attempt"] == len(wanted)
    assert job.attempts_alive_together() == []
    assert last_loss(job, attempt=status["attempt"]) < 0.75 * first_loss(job)
    assert list(job.checkpoints().glob("export/model.safetensors"))

    columns = cluster.plane.kubectl("-n", namespace, "get", names.SHORT_NAME, "quickstart").splitlines()
    assert columns[0].split()[0] == "NAME"
    assert "Succeeded" in columns[1]
    assert wanted[-1] in columns[1]
    events = cluster.plane.kubectl("-n", namespace, "events", "--for", f"{names.KIND}/quickstart")
    assert [name for name in wanted if name not in events] == []


def first_loss(job: TrainingJob) -> float:
    return float(losses(job, attempt=1)[0]["loss"])


def last_loss(job: TrainingJob, *, attempt: int) -> float:
    return float(losses(job, attempt=attempt)[-1]["loss"])


def losses(job: TrainingJob, *, attempt: int) -> list[dict[str, float]]:
    file = job.checkpoints() / names.attempt_folder(attempt) / "steps.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]
