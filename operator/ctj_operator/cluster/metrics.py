"""What the operator shows to Prometheus: every job's state, what was decided, how the operator itself is doing.

Job series are read from the cache at each scrape, so that they cost reconcile nothing and go when the object goes.
Names after the prefix follow controller-runtime, so that dashboards carry over.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ctj_api.attempt import JobIdentity
from ctj_api.status import ConditionStatus, ConditionType, Restarts, Status
from ctj_operator.cluster.queue import WorkQueue

Document = dict[str, Any]

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ENDS = (ConditionType.SUCCEEDED, ConditionType.FAILED)


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where state is read from at scrape time."""

    jobs: Callable[[], list[Document]]
    queue: WorkQueue
    is_leader: Callable[[], bool]
    heard_at: Callable[[], dict[str, float]]
    """Per watched kind, seconds since the epoch of the last sign of life."""


class OperatorMetrics:
    """All series of this process, in a registry of their own."""

    def __init__(self, sources: Sources):
        registry = self.registry = CollectorRegistry()
        registry.register(_JobSeries(sources.jobs))
        registry.register(_StateSeries(sources))
        self.finished = Counter(
            "ctj_jobs_finished", "Jobs that ended.", ["namespace", "outcome", "reason"], registry=registry
        )
        self.gates = Counter(
            "ctj_gate_evaluations", "Gate verdicts.", ["namespace", "gate", "verdict"], registry=registry
        )
        self.remedies = Counter(
            "ctj_remedies", "Remedies applied.", ["namespace", "remedy", "cause"], registry=registry
        )
        self.restarts = Counter(
            "ctj_restarts",
            "Attempts replaced after an end that was not wanted.",
            ["namespace", "kind"],
            registry=registry,
        )
        self.reconciles = Counter("ctj_reconcile", "Passes over a job.", ["result"], registry=registry)
        self.reconcile_seconds = Histogram(
            "ctj_reconcile_time_seconds", "Duration of a pass.", buckets=_FAST, registry=registry
        )
        self.queue_seconds = Histogram(
            "ctj_workqueue_queue_duration_seconds", "Wait of a job for a worker.", buckets=_FAST, registry=registry
        )
        self.retries = Counter("ctj_workqueue_retries", "Passes put off by back-off.", registry=registry)
        self.requests = Histogram(
            "ctj_api_request_duration_seconds",
            "Requests to the API server; code 0 means no answer.",
            ["verb", "resource", "code"],
            buckets=_FAST,
            registry=registry,
        )

    def observe_request(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """Count one request."""
        self.requests.labels(verb, resource, str(code)).observe(seconds)

    def count_change(self, job: JobIdentity, before: Status, after: Status) -> None:
        """Count what a stored status says that the one before it did not."""
        for remedy in _added(before.remedies, after.remedies):
            self.remedies.labels(job.namespace, remedy.what, remedy.reason).inc()
            if remedy.what == "Restart":
                self.restarts.labels(job.namespace, _restart_kind(before.restarts, after.restarts)).inc()
        known = {(gate.name, gate.attempt) for stage in before.ladder for gate in stage.gates}
        for stage in after.ladder:
            for gate in stage.gates:
                if (gate.name, gate.attempt) not in known:
                    self.gates.labels(job.namespace, gate.name, gate.verdict.value).inc()
        if after.finished_at and not before.finished_at:
            end = next((c for c in after.conditions if c.type in _ENDS and c.status is ConditionStatus.TRUE), None)
            self.finished.labels(job.namespace, end.type.value if end else "", end.reason if end else "").inc()


def _added(before: list[Any], after: list[Any]) -> list[Any]:
    """Return the entries of a bounded list that only grows at its end."""
    return [entry for entry in after if entry not in before]


def _restart_kind(before: Restarts, after: Restarts) -> str:
    """Say which of the two budgets was spent; a new checkpoint may have refilled both just before."""
    is_disruption = after.disruptions > before.disruptions or not after.failures
    return "disruption" if is_disruption else "failure"


class _JobSeries(Collector):
    """One set of series per known job."""

    def __init__(self, jobs: Callable[[], list[Document]]):
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        """Read the cache."""
        info = GaugeMetricFamily(
            "ctj_job_info", "State of a job.", labels=["namespace", "job", "attempt", "stage", "mode", "phase"]
        )
        conditions = GaugeMetricFamily(
            "ctj_job_status_condition",
            "1 for the status a condition has.",
            labels=["namespace", "job", "type", "status"],
        )
        gpu_seconds = CounterMetricFamily("ctj_gpu_seconds", "GPU time held.", labels=["namespace", "job"])
        for document in self._jobs():
            metadata, status = document["metadata"], document.get("status", {})
            owner = [metadata["namespace"], metadata["name"]]
            rest = [str(status.get("attempt", 0)), *(status.get(field, "") for field in ("stage", "mode", "phase"))]
            info.add_metric([*owner, *rest], 1)
            gpu_seconds.add_metric(owner, status.get("gpuSeconds", 0.0))
            for condition in status.get("conditions", []):
                for value in ConditionStatus:
                    conditions.add_metric([*owner, condition["type"], value.value], condition["status"] == value.value)
        yield from (info, conditions, gpu_seconds)


class _StateSeries(Collector):
    """The operator's own state at the moment of the scrape."""

    def __init__(self, sources: Sources):
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        """Ask queue, lease and watches."""
        numbers = self._sources.queue.numbers()
        yield GaugeMetricFamily("ctj_workqueue_depth", "Jobs waiting for a worker.", value=numbers.depth)
        yield GaugeMetricFamily("ctj_workqueue_delayed", "Jobs to be looked at later.", value=numbers.delayed)
        yield GaugeMetricFamily(
            "ctj_workqueue_longest_running_processor_seconds",
            "Age of the longest pass that is going on.",
            value=numbers.longest_work_seconds,
        )
        yield GaugeMetricFamily("ctj_leader", "1 while this process leads.", value=float(self._sources.is_leader()))
        heard = GaugeMetricFamily(
            "ctj_informer_last_event_timestamp_seconds",
            "Last sign of life of a kind's most silent watch.",
            labels=["resource"],
        )
        for resource, moment in self._sources.heard_at().items():
            heard.add_metric([resource], moment)
        yield heard
