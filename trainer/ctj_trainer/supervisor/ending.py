"""What is left of a pod: the report, whole beside the checkpoints and cut to 4 KiB as the termination message."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ctj_api.attempt import Attempt, Mode
from ctj_api.names import REPORT_FILE
from ctj_api.report import MAX_NOTICES, MAX_TERMINATION_BYTES, CheckpointRef, Progress, Report
from ctj_trainer.supervisor.outcome import PodOutcome

CUT = f"[cut; the whole is in {REPORT_FILE}] "


def read_draft(run_dir: Path, attempt: Attempt) -> tuple[Report | None, str | None]:
    """Return what global rank 0 reported so far, and a notice where that cannot be used."""
    path = run_dir / REPORT_FILE
    try:
        text = path.read_text()
    except OSError:
        return None, None
    try:
        report = Report.model_validate_json(text)
    except ValueError as error:
        first_line = str(error).splitlines()[0]
        return None, f"the workers' report could not be read ({first_line}): measurements of this stage are lost"
    if report.attempt != attempt.attempt:
        return None, f"the workers' report is of attempt {report.attempt}, not of {attempt.attempt}: ignored"
    return report, None


def complete(
    draft: Report | None, *, attempt: Attempt, outcome: PodOutcome, progress: Progress | None, notices: Sequence[str]
) -> Report:
    """Add how it ended; where the draft is an early one or there is none, what the last progress tells."""
    report = draft or _from_progress(attempt, progress)
    if draft is not None and not draft.measurements:
        early = {"memory": draft.memory, "compile_cache": draft.compile_cache, "notices": draft.notices}
        report = _from_progress(attempt, progress).model_copy(update=early)
    step = max(report.step, progress.step if progress is not None else 0)
    return report.model_copy(
        update={
            "exit_code": int(outcome.code),
            "failure": outcome.failure,
            "step": step,
            "notices": [*report.notices, *notices][:MAX_NOTICES],
        }
    )


def fit(report: Report, *, limit: int = MAX_TERMINATION_BYTES) -> bytes:
    """Return the report as JSON of at most `limit` bytes; what people can read elsewhere goes first, and it says so."""
    document = report.to_document()
    text = _encode(report)
    for shortened in _shorter(document):
        if len(text) <= limit:
            break
        text = _encode(Report.from_document(shortened))
    return text


def write_report(report: Report, path: Path) -> None:
    """Write the whole report atomically.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.write_bytes(_encode(report))
    draft.replace(path)


def _from_progress(attempt: Attempt, progress: Progress | None) -> Report:
    kept = progress.checkpoint_step if progress is not None else None
    return Report(
        attempt=attempt.attempt,
        stage=attempt.stage.name,
        exit_code=0,
        mode=progress.mode if progress is not None else Mode.EAGER,
        start_step=attempt.window.start_step,
        step=progress.step if progress is not None else 0,
        checkpoint=CheckpointRef(attempt=attempt.attempt, step=kept) if kept is not None else None,
    )


def _shorter(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield ever shorter forms: log lines, notices, messages, reasons, predictions. Measurements are never cut: gates
    read them."""
    failure = document.get("failure", {})
    for keep in (1000, 500, 200, 0):
        _cut_end(failure, "lastLines", keep)
        yield document
    for keep in (200, 80):
        document["notices"] = [_start(notice, keep) for notice in document.get("notices", [])]
        yield document
    steps: tuple[Callable[[], None], ...] = (
        lambda: _cut_start(failure, "message", 300),
        lambda: _cut_start(document.get("compile", {}), "reason", 120),
        lambda: document.update(notices=[CUT.strip()]),
        lambda: document.update(memory=[]),
        lambda: _cut_start(failure, "message", 80),
    )
    for step in steps:
        step()
        yield document


def _cut_end(owner: dict[str, Any], field: str, keep: int) -> None:
    text = owner.get(field, "")
    if len(text) > keep + len(CUT):
        owner[field] = CUT + text[len(text) - keep :]


def _cut_start(owner: dict[str, Any], field: str, keep: int) -> None:
    if field in owner:
        owner[field] = _start(owner[field], keep)


def _start(text: str, keep: int) -> str:
    return text if len(text) <= keep + len(CUT) else CUT + text[:keep]


def _encode(report: Report) -> bytes:
    return report.model_dump_json(by_alias=True, exclude_none=True).encode()
