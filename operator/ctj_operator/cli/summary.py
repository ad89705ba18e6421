"""The closing words of a run: one row per stage, the model, and what to do next; and the report page."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ctj_api.exit_codes import RunExit
from ctj_api.names import EXPORT_FOLDER
from ctj_api.spec import GateMode, Measurement
from ctj_api.status import StagePhase, StageStatus
from ctj_api.thresholds import Verdict, worst
from ctj_operator.cli import explain, words
from ctj_operator.local.store import Store
from ctj_operator.page.gather import AttemptRecord, PageContent, Record, gather


@dataclass(frozen=True, kw_only=True)
class StageSummary:
    """One stage in figures."""

    stage: str
    strategy: str
    processes: int
    phase: str
    steps: str
    mode: str
    why: str
    first_loss: float | None
    last_loss: float | None
    gates: str
    peak_memory_bytes: int | None
    compile_seconds: float | None
    training_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Closing:
    """How a run ended."""

    headline: str
    stages: tuple[StageSummary, ...]
    details: tuple[str, ...]
    """First failure, last lines, what to do."""
    export: Path | None

    def to_document(self) -> dict[str, Any]:
        """Return the plain document of `--json`."""
        return {
            "headline": self.headline,
            "stages": [asdict(stage) for stage in self.stages],
            "details": list(self.details),
            "export": None if self.export is None else str(self.export),
        }


def closing(store: Store, outcome: RunExit, *, command: str) -> Closing:
    """Gather it from the job's folder."""
    job, status = store.read_job(), store.read_status().status
    content = gather(job.identity.name, job.parsed_spec(), status, store.checkpoints)
    export = store.checkpoints / EXPORT_FOLDER
    return Closing(
        headline=_headline(content, outcome),
        stages=stage_summaries(content),
        details=tuple(explain.next_steps(store, status, outcome, command=command)),
        export=export if outcome is RunExit.SUCCEEDED and export.exists() else None,
    )


def write_report(store: Store) -> Path:
    """Write the page of a job beside its files."""
    from ctj_operator.page.build import write_page  # jinja2 and matplotlib: only when a page is written

    job, status = store.read_job(), store.read_status().status
    content = gather(job.identity.name, job.parsed_spec(), status, store.checkpoints)
    return write_page(content, store.folder / "report.html")


def stage_summaries(content: PageContent) -> tuple[StageSummary, ...]:
    """Return one summary per stage of the ladder."""
    known = {stage.name: stage for stage in content.status.ladder}
    return tuple(
        _stage_summary(content, known.get(stage.name, StageStatus(name=stage.name)), index)
        for index, stage in enumerate(content.spec.ladder)
    )


def _stage_summary(content: PageContent, status: StageStatus, index: int) -> StageSummary:
    stage = content.spec.ladder[index]
    records = _surviving_steps(content.of_stage(stage.name))
    fresh = [record for record in records if not record.get("replay")]
    memory = [int(record["memoryBytes"]) for record in records if record.get("memoryBytes")]
    compile_seconds = status.measurements.get(Measurement.COMPILE_SECONDS)
    return StageSummary(
        stage=stage.name,
        strategy=stage.strategy,
        processes=stage.world_size,
        phase=status.phase,
        steps=f"{fresh[0]['step']}-{fresh[-1]['step']}" if fresh else "-",
        mode=status.mode or "",
        why=status.compile_reason or status.message,
        first_loss=float(fresh[0]["loss"]) if fresh else None,
        last_loss=float(fresh[-1]["loss"]) if fresh else None,
        gates=_gates(status),
        peak_memory_bytes=max(memory, default=None),
        compile_seconds=float(compile_seconds) if compile_seconds else None,
        training_seconds=sum(float(record["seconds"]) for record in records) if records else None,
    )


def _surviving_steps(attempts: tuple[AttemptRecord, ...]) -> list[Record]:
    """Return each step once, as the newest attempt that made it saw it."""
    by_step = {record["step"]: record for attempt in attempts for record in attempt.steps}
    return [by_step[step] for step in sorted(by_step)]


def _gates(status: StageStatus) -> str:
    """Say 5 passed; or name those that did not."""
    enforced = [gate for gate in status.gates if gate.mode is GateMode.ENFORCE]
    if not enforced:
        return "-"
    if worst([gate.verdict for gate in enforced]) is Verdict.PASSED:
        return f"{len(enforced)} passed"
    return ", ".join(f"{gate.name} {gate.verdict}" for gate in enforced if gate.verdict is not Verdict.PASSED)


def _headline(content: PageContent, outcome: RunExit) -> str:
    status, steps = content.status, content.spec.training.steps
    name = content.name
    return {
        RunExit.SUCCEEDED: f"{name} succeeded: {steps} steps through {words.plural(len(content.spec.ladder), 'stage')}",
        RunExit.FAILED: f"{name} failed in stage {status.stage} at step {status.step} of {steps}",
        RunExit.HELD: f"{name} is held in stage {status.stage} at step {status.step} of {steps}",
        RunExit.STOPPED: f"{name} is stopped in stage {status.stage} at step {status.step} of {steps}",
    }[outcome]


def show(closing: Closing) -> None:
    """Print it; at most 80 columns wide while names are short."""
    print(f"\n{closing.headline}")
    print("\n".join(words.aligned([_HEADER, *(_cells(stage) for stage in closing.stages)])))
    for stage in closing.stages:
        if stage.why:
            print(f"  {stage.stage}: {stage.why}")
    for line in closing.details:
        print(line)
    if closing.export is not None:
        print(f"Model:  {relative(closing.export)}", flush=True)


_HEADER = ("stage", "steps", "mode", "loss", "gates", "memory", "compile", "train")


def _cells(stage: StageSummary) -> tuple[str, ...]:
    trained = stage.first_loss is not None
    kind = "" if stage.stage == stage.strategy else f" {stage.strategy}"
    return (
        f"{stage.stage}{kind} x{stage.processes}",
        stage.steps,
        (stage.mode if stage.phase == StagePhase.PASSED else stage.phase).lower(),
        f"{words.figure(stage.first_loss, 3)} -> {words.figure(stage.last_loss, 3)}" if trained else "-",
        stage.gates,
        words.size(stage.peak_memory_bytes),
        words.duration(stage.compile_seconds),
        words.duration(stage.training_seconds),
    )


def relative(path: Path) -> Path:
    """Shorten a path for people."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
