"""What does a stage leave behind? Its report, written by rank 0 for the supervisor to complete."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ctj_api.attempt import Attempt, CacheArchive, Mode
from ctj_api.exit_codes import ExitCode
from ctj_api.names import REPORT_FILE, attempt_folder
from ctj_api.report import CheckpointRef, CompileVerdict, MemoryPrediction, Report
from ctj_api.spec import Measurement
from ctj_trainer.records import StepRecord, read_records, stage_history


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Everything of a stage that outlives its processes."""

    attempt: Attempt
    exit_code: ExitCode
    start_step: int = 0
    step: int = 0
    checkpoint: CheckpointRef | None = None
    measurements: dict[Measurement, float]
    verdict: CompileVerdict | None = None
    memory: Sequence[MemoryPrediction] = ()
    notices: Sequence[str] = ()
    compile_cache: CacheArchive | None = None

    def write(self, run_dir: Path) -> None:
        """Write the draft atomically; a later one replaces it."""
        report = Report(
            attempt=self.attempt.attempt,
            stage=self.attempt.stage.name,
            exit_code=int(self.exit_code),
            mode=self.verdict.mode if self.verdict else Mode.EAGER,
            start_step=self.start_step,
            step=self.step,
            checkpoint=self.checkpoint,
            measurements=self.measurements,
            compile=self.verdict,
            memory=list(self.memory),
            notices=list(self.notices),
            compile_cache=self.compile_cache,
        )
        draft = run_dir / f".{REPORT_FILE}.tmp"
        draft.write_text(report.model_dump_json(by_alias=True, exclude_none=True))
        draft.replace(run_dir / REPORT_FILE)


def replay_reference(attempt: Attempt, root: Path) -> dict[int, StepRecord]:
    """Read the previous stage's record of the replay window; it may lie in several attempts of that stage."""
    replay = attempt.replay
    if replay is None:
        return {}
    last = read_records(root / attempt_folder(replay.attempt)).get(replay.to_step)
    if last is None:
        return {}
    numbers = [entry.attempt for entry in attempt.lineage if entry.attempt < replay.attempt]
    folders = [root / attempt_folder(number) for number in [*numbers, replay.attempt]]
    return stage_history(folders, stage=last.stage, until=replay.to_step)
