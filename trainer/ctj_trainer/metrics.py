"""Which numbers does a training pod show to Prometheus, and how do those of several ranks get onto one page?

Each rank writes its own values to one small file in the run folder, atomically; the supervisor's endpoint reads them at
each scrape. One value per name and rank whatever the process id, and a dead rank's values are gone with the next scrape
(prometheus-client's multi-process files keep both for ever: client_python issues 495 and 566). No torch.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

PUBLISH_SECONDS = 1.0
_STEP_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Kind(StrEnum):
    """How a value behaves over time."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One entry of the public list; `label` is the label beside the common ones."""

    kind: Kind
    help: str
    label: str | None = None


METRICS = {
    "ctj_train_step": Metric(kind=Kind.GAUGE, help="Last finished optimizer step."),
    "ctj_train_loss": Metric(kind=Kind.GAUGE, help="Mean token loss of the last step, over all ranks."),
    "ctj_train_grad_norm": Metric(kind=Kind.GAUGE, help="Global gradient norm of the last step, before clipping."),
    "ctj_train_nonfinite_total": Metric(kind=Kind.COUNTER, help="Steps with a non-finite loss or gradient norm."),
    "ctj_train_skipped_total": Metric(kind=Kind.COUNTER, help="Steps skipped because fp16 gradients overflowed."),
    "ctj_train_loss_scale": Metric(kind=Kind.GAUGE, help="Factor on the loss under fp16."),
    "ctj_train_evaluation_loss": Metric(kind=Kind.GAUGE, help="Mean token loss of the last evaluation."),
    "ctj_train_samples_total": Metric(kind=Kind.COUNTER, help="Samples this rank trained on in this attempt."),
    "ctj_train_tokens_total": Metric(
        kind=Kind.COUNTER, help="Tokens trained on in this attempt, an equal share for each rank."
    ),
    "ctj_train_step_seconds": Metric(kind=Kind.HISTOGRAM, help="Duration of optimizer steps."),
    "ctj_train_last_progress_timestamp_seconds": Metric(kind=Kind.GAUGE, help="When the last step ended."),
    "ctj_compile_graphs": Metric(kind=Kind.GAUGE, help="Distinct graphs compiled."),
    "ctj_compile_recompiles_total": Metric(kind=Kind.COUNTER, help="Recompilations.", label="reason"),
    "ctj_compile_graph_breaks_total": Metric(kind=Kind.COUNTER, help="Graph breaks.", label="reason"),
    "ctj_compile_failures_total": Metric(kind=Kind.COUNTER, help="Failed compilations.", label="class"),
    "ctj_compile_seconds_total": Metric(kind=Kind.COUNTER, help="Time spent compiling."),
    "ctj_compile_cache_requests_total": Metric(kind=Kind.COUNTER, help="Compile cache look-ups.", label="result"),
    "ctj_compile_active": Metric(kind=Kind.GAUGE, help="1 compiled, 0 eager."),
    "ctj_fallback_total": Metric(kind=Kind.COUNTER, help="Changes from compiled to eager.", label="cause"),
    "ctj_control_sequence": Metric(kind=Kind.GAUGE, help="Newest control state acted on."),
    "ctj_memory_used_bytes": Metric(kind=Kind.GAUGE, help="Memory this rank uses now."),
    "ctj_memory_peak_bytes": Metric(kind=Kind.GAUGE, help="Most memory this rank has used."),
    "ctj_memory_limit_bytes": Metric(kind=Kind.GAUGE, help="Memory this rank may use."),
    "ctj_checkpoint_seconds": Metric(kind=Kind.GAUGE, help="Duration of the last save."),
    "ctj_checkpoint_last_step": Metric(kind=Kind.GAUGE, help="Step of the newest complete checkpoint."),
}


class RankMetrics:
    """The values of one rank; cheap to call every step, written at most once a second."""

    def __init__(self, run_dir: Path, *, rank: int) -> None:
        self._path = _path(run_dir, rank)
        self._draft = run_dir / f".{self._path.name}.{os.getpid()}.tmp"
        self._rank = rank
        self._values: dict[str, dict[str, float]] = {}  # name -> label value ("" without a label) -> value
        self._observed: dict[str, dict[str, Any]] = {}  # name -> counts per bucket, sum
        self._published_at = 0.0

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        _expect(name, Kind.GAUGE)
        self._values.setdefault(name, {})[""] = float(value)

    def add(self, name: str, amount: float = 1.0, *, label: str = "") -> None:
        """Add to a counter; `label` is the value of its extra label, if it has one."""
        metric = _expect(name, Kind.COUNTER)
        if bool(label) != bool(metric.label):
            raise ValueError(f"metrics: {name} takes {metric.label or 'no label'}, got {label!r}")
        values = self._values.setdefault(name, {})
        values[label] = values.get(label, 0.0) + amount

    def observe(self, name: str, value: float) -> None:
        """Count one duration in a histogram."""
        _expect(name, Kind.HISTOGRAM)
        seen = self._observed.setdefault(name, {"counts": [0] * (len(_STEP_BUCKETS) + 1), "sum": 0.0})
        bucket = next((i for i, limit in enumerate(_STEP_BUCKETS) if value <= limit), len(_STEP_BUCKETS))
        seen["counts"][bucket] += 1
        seen["sum"] += value

    def publish(self, *, force: bool = False) -> None:
        """Make the values visible to the next scrape."""
        now = time.monotonic()
        if not force and now - self._published_at < PUBLISH_SECONDS:
            return
        self._published_at = now
        document = {"rank": self._rank, "pid": os.getpid(), "values": self._values, "observed": self._observed}
        try:
            self._draft.write_text(json.dumps(document))
            self._draft.replace(self._path)
        except OSError:
            return  # numbers are lost until there is space again; training is not


class PodMetrics:
    """Collector over the ranks' files of one run folder; registered by the supervisor."""

    def __init__(self, run_dir: Path, labels: dict[str, str]) -> None:
        self._run_dir = run_dir
        self._labels = labels

    def describe(self) -> Iterable[Any]:
        """Tell the registry not to call `collect` at registration."""
        return ()

    def collect(self) -> Iterator[Any]:
        """Yield every metric with one sample per living rank."""
        ranks = living_ranks(self._run_dir)
        for name, metric in METRICS.items():
            family = self._family(name, metric)
            for rank in ranks:
                self._add_rank(family, name, metric, rank)
            if family.samples:
                yield family

    def _family(self, name: str, metric: Metric) -> Any:
        from prometheus_client import core

        labels = [*self._labels, "rank", *([metric.label] if metric.label else [])]
        kinds = {
            Kind.GAUGE: core.GaugeMetricFamily,
            Kind.COUNTER: core.CounterMetricFamily,
            Kind.HISTOGRAM: core.HistogramMetricFamily,
        }
        return kinds[metric.kind](name, metric.help, labels=labels)

    def _add_rank(self, family: Any, name: str, metric: Metric, document: dict[str, Any]) -> None:
        common = [*self._labels.values(), str(document["rank"])]
        for label, value in document["values"].get(name, {}).items():
            family.add_metric([*common, *([label] if metric.label else [])], float(value))
        seen = document["observed"].get(name)
        if seen:
            total, buckets = 0, []
            for limit, count in zip((*map(str, _STEP_BUCKETS), "+Inf"), seen["counts"], strict=True):
                total += count
                buckets.append((limit, total))
            family.add_metric(common, buckets, seen["sum"])


def living_ranks(run_dir: Path) -> list[dict[str, Any]]:
    """Return the documents of ranks whose process still lives, by rank."""
    documents = []
    for path in run_dir.glob("metrics-*.json"):
        try:
            document = json.loads(path.read_text())
            os.kill(int(document["pid"]), 0)
        except (OSError, ValueError, KeyError):
            continue  # gone between listing and reading, or its process is
        documents.append(document)
    return sorted(documents, key=lambda document: int(document["rank"]))


def clear_metrics(run_dir: Path) -> None:
    """Forget what an earlier process left in the same folder."""
    for path in run_dir.glob("metrics-*.json"):
        path.unlink(missing_ok=True)


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / f"metrics-{rank}.json"


def _expect(name: str, kind: Kind) -> Metric:
    metric = METRICS.get(name)
    if metric is None or metric.kind is not kind:
        raise ValueError(f"metrics: {name} is not a {kind} of METRICS; add it there first")
    return metric
