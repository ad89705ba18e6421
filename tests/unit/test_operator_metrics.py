"""What the operator counts, and what it shows of jobs."""

from itertools import pairwise
from typing import Any

from ctj_api.attempt import JobIdentity
from ctj_api.spec import GateMode, OnFailure
from ctj_api.status import (
    Condition,
    ConditionStatus,
    ConditionType,
    GateVerdict,
    Remedy,
    Restarts,
    StageStatus,
    Status,
)
from ctj_api.thresholds import Verdict
from ctj_operator.cluster.metrics import OperatorMetrics, Sources
from ctj_operator.cluster.queue import WorkQueue

JOB = JobIdentity(namespace="research", name="llama", uid="u")
NOW = "2026-01-01T00:00:00Z"


def metrics_over(*documents: dict[str, Any]) -> OperatorMetrics:
    sources = Sources(
        jobs=lambda: list(documents), queue=WorkQueue(), is_leader=lambda: True, heard_at=lambda: {"pods": 7.0}
    )
    return OperatorMetrics(sources)


def value(metrics: OperatorMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def remedy(what: str) -> Remedy:
    return Remedy(what=what, reason="GateFailed", evidence="", attempt=1, step=1, at=NOW)


def stage(*gates: tuple[str, Verdict, int]) -> StageStatus:
    verdicts = [
        GateVerdict(
            name=name, mode=GateMode.ENFORCE, on_failure=OnFailure.HOLD, verdict=verdict, attempt=attempt, evidence=[]
        )
        for name, verdict, attempt in gates
    ]
    return StageStatus(name="full", gates=verdicts)


def test_what_a_status_newly_says_is_counted_once() -> None:
    metrics = metrics_over()
    first = Status(remedies=[remedy("Fallback")], ladder=[stage(("parity", Verdict.FAILED, 1))])
    second = Status(
        remedies=[remedy("Fallback"), remedy("Rollback")],
        ladder=[stage(("parity", Verdict.PASSED, 2))],
    )
    metrics.count_change(JOB, Status(), first)
    metrics.count_change(JOB, first, second)
    metrics.count_change(JOB, second, second)
    for what in ("Fallback", "Rollback"):
        labels = {"namespace": "research", "remedy": what, "cause": "GateFailed"}
        assert value(metrics, "ctj_remedies_total", **labels) == 1
    for verdict in ("Failed", "Passed"):
        labels = {"namespace": "research", "gate": "parity", "verdict": verdict}
        assert value(metrics, "ctj_gate_evaluations_total", **labels) == 1


def test_restarts_are_counted_although_checkpoints_refill_the_budgets() -> None:
    metrics = metrics_over()
    budgets = [Restarts(), *(Restarts(failures=f, disruptions=d) for f, d in ((1, 0), (1, 0), (1, 1), (0, 1), (1, 0)))]
    steps = [
        Status(restarts=budget, remedies=[remedy("Restart").model_copy(update={"step": n}) for n in range(index)])
        for index, budget in enumerate(budgets)
    ]
    for before, after in pairwise(steps):
        metrics.count_change(JOB, before, after)
    assert value(metrics, "ctj_restarts_total", namespace="research", kind="failure") == 3
    assert value(metrics, "ctj_restarts_total", namespace="research", kind="disruption") == 2


def test_an_end_is_counted_with_its_reason_when_it_comes() -> None:
    metrics = metrics_over()
    failed = Condition(
        type=ConditionType.FAILED, status=ConditionStatus.TRUE, reason="RetryLimit", last_transition_time=NOW
    )
    over = Status(conditions=[failed], finished_at=NOW)
    metrics.count_change(JOB, Status(), over)
    metrics.count_change(JOB, over, over)
    labels = {"namespace": "research", "outcome": "Failed", "reason": "RetryLimit"}
    assert value(metrics, "ctj_jobs_finished_total", **labels) == 1


def test_a_jobs_series_are_read_from_its_stored_status() -> None:
    status = {
        "attempt": 3,
        "stage": "full",
        "mode": "Eager",
        "phase": "Running",
        "gpuSeconds": 12.5,
        "conditions": [{"type": "Running", "status": "True"}],
    }
    metrics = metrics_over({"metadata": {"namespace": "research", "name": "llama"}, "status": status})
    job = {"namespace": "research", "job": "llama"}
    assert value(metrics, "ctj_job_info", **job, attempt="3", stage="full", mode="Eager", phase="Running") == 1
    shown = [value(metrics, "ctj_job_status_condition", **job, type="Running", status=s) for s in ("True", "False")]
    assert shown == [1, 0]
    assert value(metrics, "ctj_gpu_seconds_total", **job) == 12.5


def test_a_job_that_nobody_looked_at_yet_has_a_series_too() -> None:
    metrics = metrics_over({"metadata": {"namespace": "research", "name": "new"}})
    labels = {"namespace": "research", "job": "new", "attempt": "0", "stage": "", "mode": "", "phase": ""}
    assert value(metrics, "ctj_job_info", **labels) == 1


def test_the_operators_own_state_is_shown() -> None:
    metrics = metrics_over()
    metrics.observe_request("create", "jobs", 409, 0.01)
    assert value(metrics, "ctj_leader") == 1
    assert value(metrics, "ctj_workqueue_depth") == 0
    assert value(metrics, "ctj_informer_last_event_timestamp_seconds", resource="pods") == 7.0
    labels = {"verb": "create", "resource": "jobs", "code": "409"}
    assert value(metrics, "ctj_api_request_duration_seconds_count", **labels) == 1
