"""The page's numbers: one row per stage, per check and per switch, as plain values for the template."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from ctj_api.report import CompileVerdict
from ctj_api.spec import GateMode, Measurement
from ctj_api.status import StageStatus
from ctj_operator.page.gather import AttemptRecord, PageContent, Record


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """One check of one gate."""

    stage: str
    gate: str
    measurement: str
    value: str
    limits: str
    verdict: str
    dry_run: bool


@dataclass(frozen=True, kw_only=True)
class SwitchRow:
    """From the last step of one attempt to the first new step of the next."""

    from_stage: str
    to_stage: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """One stage in numbers."""

    name: str
    strategy: str
    world_size: int
    phase: str
    mode: str
    reason: str
    attempts: str
    steps: str
    first_loss: float | None
    last_loss: float | None
    compile_seconds: float | None
    graphs: int | None
    recompiles: int | None


def _new_steps(attempts: Sequence[AttemptRecord]) -> list[Record]:
    return [record for attempt in attempts for record in attempt.steps if not record.get("replay")]


def _last(attempts: Sequence[AttemptRecord], key: str) -> float | None:
    for attempt in reversed(attempts):
        for record in reversed(attempt.steps):
            if record.get(key) is not None:
                return float(record[key])
    return None


def stage_rows(content: PageContent) -> list[StageRow]:
    """Return one row per stage of the ladder, in order."""
    known = {stage.name: stage for stage in content.status.ladder}
    rows = []
    for entry in content.spec.ladder:
        stage = known.get(entry.name, StageStatus(name=entry.name))
        attempts = content.of_stage(entry.name)
        steps = _new_steps(attempts)
        graphs, recompiles = _last(attempts, "graphs"), _last(attempts, "recompiles")
        rows.append(
            StageRow(
                name=entry.name,
                strategy=entry.strategy.value,
                world_size=entry.world_size,
                phase=stage.phase.value,
                mode=stage.mode.value if stage.mode else "",
                reason=_reason(stage, attempts),
                attempts=", ".join(str(number) for number in stage.attempts),
                steps=f"{stage.start_step} to {stage.end_step}",
                first_loss=float(steps[0]["loss"]) if steps else None,
                last_loss=float(steps[-1]["loss"]) if steps else None,
                compile_seconds=_last(attempts, "compileSeconds"),
                graphs=None if graphs is None else int(graphs),
                recompiles=None if recompiles is None else int(recompiles),
            )
        )
    return rows


def limits_text(minimum: str | None, maximum: str | None) -> str:
    """Write a threshold range the way people read it."""
    parts = [f"at least {minimum}" if minimum is not None else "", f"at most {maximum}" if maximum is not None else ""]
    return " and ".join(part for part in parts if part)


def comparison_text(verdict: CompileVerdict) -> str:
    """Say what compiled and eager steps took, and after how many steps the compilation is paid for."""
    if verdict.eager_step_seconds is None or verdict.compiled_step_seconds is None:
        return ""
    text = f"a step takes {verdict.eager_step_seconds:.3g} s eager, {verdict.compiled_step_seconds:.3g} s compiled"
    if verdict.break_even_steps is None:
        return f"{text}; compiling never pays for itself"
    return f"{text}; compiling pays for itself after {verdict.break_even_steps:.0f} steps"


def _reason(stage: StageStatus, attempts: Sequence[AttemptRecord]) -> str:
    verdicts = [attempt.report.compile for attempt in attempts if attempt.report and attempt.report.compile]
    texts = [stage.compile_reason or stage.message, comparison_text(verdicts[-1]) if verdicts else ""]
    return "; ".join(text for text in texts if text)


def short_figure(value: str | None) -> str:
    """Shorten a stored figure for the page; the status keeps all of it."""
    if value is None:
        return "no data"
    number = float(value)
    return f"{number:.4g}"


def check_rows(content: PageContent) -> list[CheckRow]:
    """Return every check of every gate with its value, limits and verdict."""
    return [
        CheckRow(
            stage=stage.name,
            gate=gate.name,
            measurement=evidence.measurement.value,
            value=short_figure(evidence.value),
            limits=limits_text(evidence.min, evidence.max),
            verdict=evidence.verdict.value,
            dry_run=gate.mode is GateMode.DRY_RUN,
        )
        for stage in content.status.ladder
        for gate in stage.gates
        for evidence in gate.evidence
    ]


def switch_rows(content: PageContent) -> list[SwitchRow]:
    """Measure each stage switch by the clocks of both sides: end of the last step to start of the first, replayed or
    not."""
    rows = []
    with_steps = [attempt for attempt in content.attempts if attempt.steps]
    for before, after in pairwise(with_steps):
        ended, began = before.steps[-1].get("at"), after.steps[0].get("at")
        if before.stage != after.stage and ended is not None and began is not None:
            rows.append(
                SwitchRow(
                    from_stage=before.stage,
                    to_stage=after.stage,
                    seconds=float(began) - float(after.steps[0].get("seconds") or 0.0) - float(ended),
                )
            )
    return rows


def parity_rows(content: PageContent) -> list[tuple[str, str, str, str, str]]:
    """Return (stage, probe loss, probe gradient norm, replay loss, replay gradient norm) as relative differences."""
    wanted = (
        Measurement.PROBE_LOSS_RELATIVE,
        Measurement.PROBE_GRAD_NORM_RELATIVE,
        Measurement.REPLAY_LOSS_RELATIVE,
        Measurement.REPLAY_GRAD_NORM_RELATIVE,
    )
    rows = []
    for stage in content.status.ladder:
        figures = [short_figure(stage.measurements[key]) if key in stage.measurements else "" for key in wanted]
        if any(figures):
            rows.append((stage.name, figures[0], figures[1], figures[2], figures[3]))
    return rows


def duration_seconds(content: PageContent) -> float | None:
    """Wall time from the first attempt to the end, if the job has ended."""
    started, finished = content.status.started_at, content.status.finished_at
    if not started or not finished:
        return None
    return (datetime.fromisoformat(finished) - datetime.fromisoformat(started)).total_seconds()
