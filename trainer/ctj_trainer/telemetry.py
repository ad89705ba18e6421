"""What does the outside see of a running rank? Progress of the pod, metrics and records, written in one place."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ctj_api.attempt import Attempt, Mode
from ctj_trainer import progress
from ctj_trainer.compile.watch import ByClass, CompileFacts
from ctj_trainer.memory import MemoryUse, memory_use, start_peak
from ctj_trainer.metrics import RankMetrics
from ctj_trainer.progress import ProgressWriter
from ctj_trainer.ranks import Ranks
from ctj_trainer.records import RecordWriter, StepRecord

log = logging.getLogger("ctj")


class Telemetry:
    """Tell the outside; never raises for it."""

    def __init__(
        self,
        *,
        run_dir: Path,
        ranks: Ranks,
        pod: ProgressWriter | None,
        records: RecordWriter | None,
    ) -> None:
        self._metrics = RankMetrics(run_dir, rank=ranks.rank)
        self._run_dir = run_dir
        self._rank = ranks.rank
        self._board = ranks.board
        self._world_size = ranks.world_size
        self._device = ranks.device
        self._local_processes = ranks.local_world_size
        self._pod = pod
        self._records = records
        self._phase = progress.STARTING
        self._entered: set[str] = set()
        self._facts = CompileFacts()
        self.last_memory: MemoryUse | None = None
        self.last_peak: int | None = None

    def phase(self, phase: str) -> None:
        """Enter a phase of `Progress`; its first time is logged with the seconds since this process began."""
        if phase not in self._entered:
            self._entered.add(phase)
            log.info("%-9s after %5.1f s (%.1f s of CPU)", phase, _process_seconds(), time.process_time())
        self._phase = phase
        self._tell(phase=phase)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Tell peers and supervisor that a long silence is a compilation."""
        with progress.compiling(self._run_dir, rank=self._rank), self._board.compiling():
            self._tell(phase=progress.COMPILING)
            try:
                yield
            finally:
                self._tell(phase=self._phase)

    def memory(self) -> MemoryUse:
        """Memory of this rank now."""
        return memory_use(self._device, local_processes=self._local_processes)

    def start_peak(self) -> None:
        """Measure the peak of the coming step apart from the process's."""
        start_peak(self._device)

    def step(self, record: StepRecord, *, facts: CompileFacts, num_samples: int, sequence: int) -> None:
        """Publish one finished optimizer step."""
        memory = self.last_memory = self.memory()
        self.last_peak = memory.recent_peak
        if self._records is not None:
            self._records.add(record.model_copy(update={"memory_bytes": memory.peak}))
        self._tell(
            step=record.step,
            mode=record.mode,
            loss=record.loss,
            grad_norm=record.grad_norm,
            step_seconds=record.seconds,
            recompiles=facts.recompiles,
            graphs=facts.graphs,
            compile_seconds=facts.compile_seconds,
            memory_used_bytes=memory.used,
            memory_limit_bytes=memory.limit,
            control_sequence=sequence,
        )
        self._count(record, facts, num_samples, sequence, memory)

    def saved(self, step: int, seconds: float) -> None:
        """Publish a committed checkpoint."""
        self._tell(checkpoint_step=step)
        self._metrics.set("ctj_checkpoint_last_step", step)
        self._metrics.set("ctj_checkpoint_seconds", seconds)

    def fell_back(self, cause: str) -> None:
        """Count a change from compiled to eager, and show it at once."""
        self._metrics.add("ctj_fallback_total", label=cause)
        self._metrics.publish(force=True)

    def non_finite(self) -> None:
        """Count a step whose loss or gradient norm is no number, and show it at once."""
        self._metrics.add("ctj_train_nonfinite_total")
        self._metrics.publish(force=True)

    def close(self) -> None:
        """Show the last values, however short ago others were shown."""
        self._metrics.publish(force=True)

    def _tell(self, **fields: object) -> None:
        if self._pod is not None:
            self._pod.update(**fields)

    def _count(
        self, record: StepRecord, facts: CompileFacts, num_samples: int, sequence: int, memory: MemoryUse
    ) -> None:
        metrics, before = self._metrics, self._facts
        metrics.set("ctj_train_step", record.step)
        metrics.set("ctj_train_loss", record.loss)
        metrics.set("ctj_train_grad_norm", record.grad_norm)
        if record.loss_scale is not None:
            metrics.set("ctj_train_loss_scale", record.loss_scale)
            metrics.add("ctj_train_skipped_total", record.skipped)
        if record.evaluation_loss is not None:
            metrics.set("ctj_train_evaluation_loss", record.evaluation_loss)
        metrics.add("ctj_train_samples_total", num_samples)
        metrics.add("ctj_train_tokens_total", record.tokens / self._world_size)
        metrics.observe("ctj_train_step_seconds", record.seconds)
        metrics.set("ctj_train_last_progress_timestamp_seconds", time.time())
        metrics.set("ctj_compile_active", record.mode is Mode.COMPILED)
        metrics.set("ctj_compile_graphs", facts.graphs)
        metrics.set("ctj_control_sequence", sequence)
        metrics.set("ctj_memory_used_bytes", memory.used)
        metrics.set("ctj_memory_peak_bytes", memory.peak)
        if memory.limit:
            metrics.set("ctj_memory_limit_bytes", memory.limit)
        metrics.add("ctj_compile_seconds_total", facts.compile_seconds - before.compile_seconds)
        self._add_by_class("ctj_compile_recompiles_total", facts.recompiles_by, before.recompiles_by)
        self._add_by_class("ctj_compile_graph_breaks_total", facts.breaks_by, before.breaks_by)
        self._add_by_class("ctj_compile_failures_total", facts.failures_by, before.failures_by)
        self._add_if_any("ctj_compile_cache_requests_total", facts.cache_hits - before.cache_hits, "hit")
        self._add_if_any("ctj_compile_cache_requests_total", facts.cache_misses - before.cache_misses, "miss")
        self._facts = facts
        metrics.publish()

    def _add_by_class(self, name: str, now: ByClass, before: ByClass) -> None:
        if now is not before:
            for fault, count in now.items():
                self._add_if_any(name, count - before.get(fault, 0), fault)

    def _add_if_any(self, name: str, amount: int, label: str) -> None:
        if amount:
            self._metrics.add(name, amount, label=label)


def _process_seconds() -> float:
    """Wall time since the process started, imports included; 0 where the system does not tell."""
    try:
        started = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        now = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return 0.0
    return now - started / os.sysconf("SC_CLK_TCK")


@contextmanager
def telling(attempt: Attempt, *, run_dir: Path, folder: Path, ranks: Ranks) -> Iterator[Telemetry]:
    """Open what this rank writes: progress if it is the pod's first, records if it is the job's first."""
    with ExitStack() as stack:
        pod = records = None
        if ranks.local_rank == 0:
            pod = stack.enter_context(ProgressWriter(run_dir, attempt=attempt.attempt, mode=attempt.mode))
        if ranks.rank == 0:
            records = RecordWriter(folder)
            stack.callback(records.close)
        telemetry = Telemetry(run_dir=run_dir, ranks=ranks, pod=pod, records=records)
        stack.callback(telemetry.close)
        yield telemetry
