"""Which jobs do the cluster tests submit, and what can be seen of one from outside?"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.cluster import Cluster, oldest_first, wait_until
from tests.cluster.operators import CLAIM

from ctj_api import names

SCRIPTED = "test/scripted:1"


@dataclass(frozen=True)
class TrainingJob:
    """One CompiledTrainingJob in the cluster, looked at from outside."""

    cluster: Cluster
    namespace: str
    name: str

    def document(self) -> dict[str, Any]:
        """Return the object as it is now."""
        path = f"/apis/{names.API_VERSION}/namespaces/{self.namespace}/{names.PLURAL}/{self.name}"
        return dict(self.cluster.plane.read(path))

    def status(self) -> dict[str, Any]:
        """Return its status, empty before the operator saw it."""
        return dict(self.document().get("status", {}))

    def patch(self, spec: dict[str, Any]) -> None:
        """Change fields of the spec."""
        patch = json.dumps({"spec": spec})
        self.cluster.plane.kubectl("-n", self.namespace, "patch", names.PLURAL, self.name, "--type=merge", "-p", patch)

    def wait_for(self, condition: str, *, seconds: float = 60) -> dict[str, Any]:
        """Wait until a condition is true, or the job is over without it, and return the status."""

        def met_or_over() -> bool:
            true = {one["type"] for one in self.status().get("conditions", []) if one["status"] == "True"}
            return bool(true & {condition, "Succeeded", "Failed"})

        wait_until(f"{condition} of {self.name}", met_or_over, seconds=seconds, every=seconds / 600)
        status = self.status()
        wanted = next(one for one in status["conditions"] if one["type"] == condition)
        assert wanted["status"] == "True", f"{self.name} is over, and not {condition}: {status}"
        return status

    def wait_for_phase(self, phase: str, *, seconds: float = 60) -> dict[str, Any]:
        """Wait until the derived word for people is this one, and return the status."""
        wait_until(f"phase {phase}", lambda: self.status().get("phase") == phase, seconds=seconds)
        return self.status()

    def children(self) -> list[dict[str, Any]]:
        """Return the Jobs of its attempts, oldest first."""
        path = f"/apis/batch/v1/namespaces/{self.namespace}/jobs"
        return oldest_first(self.cluster.plane.read(path, labelSelector=f"{names.LABEL_JOB}={self.name}")["items"])

    def live_pods(self) -> list[dict[str, Any]]:
        """Return its pods that may be running a process."""
        pods = self.cluster.pods(self.namespace, f"{names.LABEL_JOB}={self.name}")
        return [pod for pod in pods if pod["status"].get("phase") in ("Pending", "Running")]

    def wait_for_pod(self, *, but: str = "", seconds: float = 30) -> str:
        """Wait for a pod of it (not the one named) whose process exists, and return its name."""

        def running() -> str:
            for pod in self.live_pods():
                name = str(pod["metadata"]["name"])
                if name != but and (self.cluster.pod_folder(self.namespace, name) / "pid").exists():
                    return name
            return ""

        return wait_until("a pod of the job", running, seconds=seconds)

    def checkpoints(self) -> Path:
        """Return the folder of all its attempts."""
        uid = self.document()["metadata"]["uid"]
        claim = self.cluster.claim_folder(self.namespace, CLAIM)
        return claim / self.namespace / f"{self.name}-{uid[:8]}"

    def attempts_alive_together(self) -> list[set[int]]:
        """Return every set of two or more attempts whose processes lived at the same time, by the node's journal."""
        alive: dict[str, int] = {}
        together = []
        for line in (self.cluster.node_directory / "journal.jsonl").read_text().splitlines():
            entry = json.loads(line)
            if (entry["namespace"], entry["labels"].get(names.LABEL_JOB)) != (self.namespace, self.name):
                continue
            if entry["what"] == "started":
                alive[entry["pod"]] = int(entry["labels"][names.LABEL_ATTEMPT])
            else:
                del alive[entry["pod"]]
            if len(set(alive.values())) > 1:
                together.append(set(alive.values()))
        return together

    def writes(self, verb: str, resource: str) -> Iterator[dict[str, Any]]:
        """Return the audit log's requests of this kind in the job's namespace."""
        for entry in self.cluster.plane.audit():
            target = entry.get("objectRef", {})
            if (target.get("namespace"), target.get("resource"), entry["verb"]) == (self.namespace, resource, verb):
                yield entry


def scripted_job(name: str, *, script: dict[str, Any] | None = None, steps: int = 4, **spec: Any) -> dict[str, Any]:
    """Build a one-stage job whose pods follow a script instead of training."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name},
        "spec": {
            "image": SCRIPTED,
            "recipe": {"name": "scripted:job", "config": script or {}},
            "training": {"steps": steps, "globalBatchSize": 4, "microBatchSize": 4},
            "ladder": [{"name": "only", "strategy": "single"}],
        }
        | spec,
    }


def submit(cluster: Cluster, namespace: str, document: dict[str, Any]) -> TrainingJob:
    """Apply the job into the namespace."""
    cluster.plane.apply(document | {"metadata": {**document["metadata"], "namespace": namespace}})
    return TrainingJob(cluster, namespace, document["metadata"]["name"])


def refused(job: TrainingJob) -> list[dict[str, Any]]:
    """Return every write in the job's namespace that the API server called invalid (422)."""
    entries = job.cluster.plane.audit()
    return [
        entry
        for entry in entries
        if entry.get("objectRef", {}).get("namespace") == job.namespace and entry["responseStatus"].get("code") == 422
    ]


def small_job(name: str, *, steps: int = 24, canary: int = 10, **second_stage: Any) -> dict[str, Any]:
    """Build a job that really trains, in two stages; compiled without C++, which would take most of the time."""
    model = {"hiddenSize": 64, "layers": 2, "heads": 2}
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name},
        "spec": {
            "recipe": {
                "name": "causal_lm",
                "config": {"model": model, "data": {"builtin": "python-stdlib", "sequenceLength": 64}},
            },
            "training": {
                "steps": steps,
                "globalBatchSize": 16,
                "microBatchSize": 2,
                "checkpoint": {"everySteps": 4, "keep": 2},
            },
            "ladder": [
                {"name": "one", "strategy": "single", "steps": canary},
                {"name": "two", "strategy": "ddp", **(second_stage or {"processesPerNode": 2})},
            ],
            "compile": {"backend": "aot_eager", "keep": "IfCorrect"},
            "restart": {"maxFailures": 10, "maxDisruptions": 50},
        },
    }
