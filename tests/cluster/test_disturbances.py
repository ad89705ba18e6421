"""Whatever is killed, and whenever: the trained result is the same, and no two attempts ever live together.

A small two-stage job is really trained, once in peace and then with pods, Jobs and the operator taken away at seeded
moments. `CTJ_DISTURBANCES` is the number of moments of each kind (`make test-disturb` takes 20).
"""

import contextlib
import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.jobs import TrainingJob, small_job, submit
from tests.cluster.operators import Operator

from ctj_api import names
from ctj_api.report import Progress

MOMENTS = int(os.environ.get("CTJ_DISTURBANCES", "2"))
PER_RUN = 4
RELATIVE = 1e-5
STEPS, CANARY = 24, 10
KINDS = ("pod", "job", "operator")


PHASES = ("Starting", "Loading", "Compiling", "Probing", "Training", "Saving")


@dataclass(frozen=True)
class Moment:
    """When to strike: a delay after a stage's pod reached a phase (or a later one), or as soon as it reached a step."""

    stage: str
    phase: str
    step: int = 0
    delay: float = 0.0


def seeded_moments(kind: str) -> list[Moment]:
    """Spread the moments over both stages: start-up, compile and probe, replay, steps, saves."""
    chance = random.Random(f"ctj {kind}")
    windows = {"one": (1, CANARY - 2), "two": (CANARY - 1, STEPS - 2)}
    moments = []
    for index in range(MOMENTS):
        stage = ("one", "two")[index % 2]
        phase = PHASES[(index // 2 + KINDS.index(kind) * 2) % len(PHASES)]
        if phase in ("Training", "Saving"):
            moments.append(Moment(stage, "Training", step=chance.randint(*windows[stage])))
        else:
            moments.append(Moment(stage, phase, delay=chance.random() * 0.5))
    return sorted(moments, key=lambda moment: (moment.stage, PHASES.index(moment.phase), moment.step))


def progress_of(job: TrainingJob, stage: str) -> tuple[str, Progress] | None:
    """Return the name and progress of the stage's running pod."""
    for pod in job.live_pods():
        if pod["metadata"]["labels"][names.LABEL_STAGE] == stage:
            name = pod["metadata"]["name"]
            file = job.cluster.pod_folder(job.namespace, name) / "volumes" / "ctj-run" / "progress.json"
            return (name, Progress.model_validate_json(file.read_text())) if file.exists() else None
    return None


def strike(kind: str, job: TrainingJob, operator: Operator, pod: str) -> None:
    """Take away the pod's process (unless it has just ended), the child Job, or the operator."""
    if kind == "pod":
        with contextlib.suppress(ProcessLookupError):
            job.cluster.kill_pod_process(job.namespace, pod)
    elif kind == "job":
        child = pod.rsplit("-", 2)[0]
        job.cluster.plane.kubectl("-n", job.namespace, "delete", "job", child, "--wait=false", "--ignore-not-found")
    else:
        operator.kill()
        operator.start()


def wait_for(moment: Moment, job: TrainingJob) -> str | None:
    """Wait for the moment and return the pod, or None when the job was over before."""
    while job.status().get("phase") not in ("Succeeded", "Failed"):
        found = progress_of(job, moment.stage)
        if found:
            name, progress = found
            passed = progress.phase in PHASES and PHASES.index(progress.phase) >= PHASES.index(moment.phase)
            if (moment.step and progress.step >= moment.step) or (not moment.step and passed):
                time.sleep(moment.delay)
                return name
        time.sleep(0.05)
    return None


def train(job: TrainingJob, operator: Operator, kind: str, moments: list[Moment]) -> tuple[int, float]:
    """Disturb the job at each moment; returns how many were struck and the final loss."""
    struck = 0
    for moment in moments:
        pod = wait_for(moment, job)
        if pod is not None:
            strike(kind, job, operator, pod)
            struck += 1
    status = job.wait_for("Succeeded", seconds=400)
    assert job.attempts_alive_together() == []
    record = job.checkpoints() / names.attempt_folder(status["attempt"]) / "steps.jsonl"
    last = json.loads(record.read_text().splitlines()[-1])
    assert last["step"] == STEPS
    return struck, float(last["loss"])


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> Iterator[float]:
    """Return the final loss of a run that nobody disturbs."""
    namespace = "undisturbed"
    cluster.plane.kubectl("create", "namespace", namespace)
    operator = Operator(cluster, namespace, cluster.plane.kubeconfig)
    operator.start()
    try:
        yield train(submit(cluster, namespace, small_job("calm", steps=STEPS, canary=CANARY)), operator, "pod", [])[1]
    finally:
        operator.stop()
        cluster.plane.kubectl("delete", "namespace", namespace, "--wait=false")


def runs() -> list[Any]:
    """Group the moments of each kind into runs."""
    grouped = []
    for kind in KINDS:
        moments = seeded_moments(kind)
        for first in range(0, len(moments), PER_RUN):
            grouped.append(pytest.param(kind, moments[first : first + PER_RUN], id=f"{kind}-{first // PER_RUN}"))
    return grouped


@pytest.mark.parametrize(("kind", "moments"), runs())
def test_the_result_is_that_of_an_undisturbed_run(
    *, cluster: Cluster, namespace: str, operator: Operator, undisturbed: float, kind: str, moments: list[Moment]
) -> None:
    struck, loss = train(
        submit(cluster, namespace, small_job("struck", steps=STEPS, canary=CANARY)), operator, kind, moments
    )
    assert struck == len(moments), "the job was over before every moment came: the moments are no longer spread over it"
    assert loss == pytest.approx(undisturbed, rel=RELATIVE)
