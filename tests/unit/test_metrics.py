"""One value per metric and rank, whatever process wrote it and however it died."""

import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from ctj_trainer.metrics import METRICS, PodMetrics, RankMetrics, clear_metrics

LABELS = {"namespace": "research", "job": "tiny", "attempt": "1", "stage": "ddp"}
WRITE_AND_WAIT = """
import sys, time
from pathlib import Path
from ctj_trainer.metrics import RankMetrics
metrics = RankMetrics(Path(sys.argv[1]), rank=1)
metrics.set("ctj_train_loss", float(sys.argv[2]))
metrics.publish()
print("written", flush=True)
time.sleep(60)
"""


def page(run_dir: Path) -> list[str]:
    registry = CollectorRegistry()
    registry.register(PodMetrics(run_dir, LABELS))
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def sample(name: str, value: str, *, rank: int = 0, **extra: str) -> str:
    labels = {**LABELS, "rank": str(rank), **extra}
    return f"{name}{{{','.join(f'{key}={labels[key]!r}' for key in sorted(labels))}}} {value}".replace("'", '"')


def writing(run_dir: Path, loss: float) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", WRITE_AND_WAIT, str(run_dir), str(loss)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    return process


def test_gauges_counters_and_histograms_reach_the_page(tmp_path: Path) -> None:
    metrics = RankMetrics(tmp_path, rank=0)
    metrics.set("ctj_train_step", 3)
    metrics.add("ctj_fallback_total", label="storm")
    metrics.add("ctj_fallback_total", label="storm")
    metrics.observe("ctj_train_step_seconds", 0.2)
    metrics.observe("ctj_train_step_seconds", 700.0)
    metrics.publish()
    lines = page(tmp_path)
    assert sample("ctj_train_step", "3.0") in lines
    assert sample("ctj_fallback_total", "2.0", cause="storm") in lines
    assert sample("ctj_train_step_seconds_bucket", "1.0", le="0.25") in lines
    assert sample("ctj_train_step_seconds_bucket", "2.0", le="+Inf") in lines
    assert sample("ctj_train_step_seconds_sum", "700.2") in lines


def test_a_rank_killed_and_started_again_has_one_value_C60(tmp_path: Path) -> None:
    """C60: kill -9 leaves nothing behind at the next scrape, and a new process id adds no second line."""
    alive = RankMetrics(tmp_path, rank=0)
    alive.set("ctj_train_loss", 1.0)
    alive.publish()
    first = writing(tmp_path, 9.0)
    assert sample("ctj_train_loss", "9.0", rank=1) in page(tmp_path)

    first.kill()
    first.communicate()
    assert page(tmp_path) == [sample("ctj_train_loss", "1.0")]

    second = writing(tmp_path, 2.0)
    try:
        assert page(tmp_path) == [sample("ctj_train_loss", "1.0"), sample("ctj_train_loss", "2.0", rank=1)]
    finally:
        second.kill()
        second.communicate()


def test_a_new_supervisor_starts_with_an_empty_page(tmp_path: Path) -> None:
    metrics = RankMetrics(tmp_path, rank=0)
    metrics.set("ctj_train_step", 3)
    metrics.publish()
    clear_metrics(tmp_path)
    assert page(tmp_path) == []


def test_values_are_written_at_most_once_a_second(tmp_path: Path) -> None:
    metrics = RankMetrics(tmp_path, rank=0)
    metrics.set("ctj_train_step", 1)
    metrics.publish()
    metrics.set("ctj_train_step", 2)
    metrics.publish()
    assert sample("ctj_train_step", "1.0") in page(tmp_path)
    metrics.publish(force=True)
    assert sample("ctj_train_step", "2.0") in page(tmp_path)


def test_a_half_written_file_is_no_metric(tmp_path: Path) -> None:
    (tmp_path / "metrics-0.json").write_text('{"rank": 0, "pid"')
    assert page(tmp_path) == []


def test_only_listed_metrics_exist(tmp_path: Path) -> None:
    metrics = RankMetrics(tmp_path, rank=0)
    with pytest.raises(ValueError, match="ctj_train_speed is not a gauge"):
        metrics.set("ctj_train_speed", 1)
    with pytest.raises(ValueError, match="ctj_train_step is not a counter"):
        metrics.add("ctj_train_step")
    with pytest.raises(ValueError, match="takes reason, got ''"):
        metrics.add("ctj_compile_recompiles_total")


def test_names_follow_prometheus_conventions() -> None:
    for name, metric in METRICS.items():
        assert name.startswith("ctj_")
        assert name.endswith("_total") == (metric.kind == "counter")
        assert metric.help.endswith(".")
