"""What the page shows, read from a job's folder: status, and the records and reports beside the checkpoints.

Reads only; a missing or half-written file means a shorter page, never no page.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctj_api.names import REPORT_FILE, STEPS_FILE, attempt_folder
from ctj_api.report import Report
from ctj_api.spec import Spec
from ctj_api.status import Status

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class AttemptRecord:
    """One attempt's per-step records and its report."""

    attempt: int
    stage: str
    steps: tuple[Record, ...]
    report: Report | None


@dataclass(frozen=True, kw_only=True)
class PageContent:
    """Everything the template and the charts need."""

    name: str
    spec: Spec
    status: Status
    attempts: tuple[AttemptRecord, ...]

    def of_stage(self, stage: str) -> tuple[AttemptRecord, ...]:
        """Attempts of one stage, oldest first."""
        return tuple(record for record in self.attempts if record.stage == stage)


def read_records(path: Path) -> tuple[Record, ...]:
    """Read steps.jsonl; a line cut short by a crash is left out."""
    if not path.exists():
        return ()
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return tuple(records)


def read_report(path: Path) -> Report | None:
    """Read report.json if it is there and whole."""
    try:
        return Report.from_document(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def gather(name: str, spec: Spec, status: Status, checkpoint_root: Path) -> PageContent:
    """Collect one job's page content from its stored spec and status and its checkpoint root."""
    stage_of = {number: stage.name for stage in status.ladder for number in stage.attempts}
    attempts = []
    for number in range(1, status.attempt + 1):
        folder = checkpoint_root / attempt_folder(number)
        steps = read_records(folder / STEPS_FILE)
        report = read_report(folder / REPORT_FILE)
        stage = report.stage if report else stage_of.get(number, steps[0]["stage"] if steps else "")
        attempts.append(AttemptRecord(attempt=number, stage=stage, steps=steps, report=report))
    return PageContent(name=name, spec=spec, status=status, attempts=tuple(attempts))
