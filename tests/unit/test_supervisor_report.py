"""What is left of a pod: a whole report, and one that fits a termination message."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.supervised import an_attempt

from ctj_api.attempt import Attempt, CacheArchive, Mode
from ctj_api.exit_codes import ExitCode
from ctj_api.names import REPORT_FILE
from ctj_api.report import CheckpointRef, CompileVerdict, Failure, MemoryPrediction, Progress, Report
from ctj_api.spec import Measurement
from ctj_trainer.supervisor import ending
from ctj_trainer.supervisor.outcome import PodOutcome


def largest_report(letter: str, value: float) -> Report:
    """Every field as long as the contract allows."""
    return Report(
        attempt=99_999,
        stage="a" * 20,
        exit_code=11,
        measurements=dict.fromkeys(Measurement, value),
        compile=CompileVerdict(mode=Mode.EAGER, reason=letter * 512, probe_loss_relative=value, speedup=value),
        memory=[MemoryPrediction(stage="s" * 20, predicted_bytes=10**15, limit_bytes=10**15)] * 4,
        failure=Failure(rank=7, reason="r" * 64, message=letter * 1024, last_lines=letter * 1500),
        notices=[letter * 1000] * 8,
        compile_cache=CacheArchive(key="k" * 256, digest="a" * 64, num_bytes=2**28),
    )


@settings(deadline=None)  # the first example pays for imports, on a machine that may be busy
@given(letter=st.characters(exclude_categories=["Cs"]), value=st.floats())
@example(letter="\x00", value=-1.2345678901234567e-300)  # the longest in JSON
def test_the_largest_report_fits_and_keeps_what_gates_read(letter: str, value: float) -> None:
    report = largest_report(letter, value)
    message = ending.fit(report)
    assert len(message) <= 4096
    cut = Report.model_validate_json(message)
    assert cut.measurements.keys() == report.measurements.keys()
    assert (cut.exit_code, cut.attempt, cut.stage) == (report.exit_code, report.attempt, report.stage)
    assert cut.failure is not None
    assert cut.failure.last_lines.startswith(ending.CUT)


def test_a_small_report_is_not_cut() -> None:
    report = Report(attempt=1, stage="only", exit_code=0, notices=["the previous checkpoint was used"])
    assert Report.model_validate_json(ending.fit(report)) == report


def test_log_lines_go_before_messages() -> None:
    failure = Failure(reason="UserCode", message="why", last_lines="é" * 1500)
    report = Report(attempt=1, stage="only", exit_code=11, failure=failure, notices=["n" * 400] * 3)
    cut = Report.model_validate_json(ending.fit(report))
    assert cut.failure is not None
    assert cut.failure.message == "why"
    assert cut.failure.last_lines.startswith(ending.CUT)
    assert cut.notices == report.notices


@pytest.fixture
def attempt() -> Attempt:
    return an_attempt(attempt=4)


def progress(**fields: object) -> Progress:
    return Progress.model_validate(
        {"attempt": 4, "step": 12, "phase": "Training", "mode": "Compiled", "updatedAt": 0.0, **fields}
    )


def test_a_pod_without_a_draft_reports_its_last_progress(attempt: Attempt) -> None:
    failed = PodOutcome(code=ExitCode.KILLED, failure=Failure(reason="Killed", message="rank 1 was killed"))
    report = ending.complete(
        None, attempt=attempt, outcome=failed, progress=progress(checkpointStep=10), notices=["no cache"]
    )
    assert (report.attempt, report.step, report.exit_code, report.mode) == (4, 12, 137, Mode.COMPILED)
    assert report.checkpoint == CheckpointRef(attempt=4, step=10)
    assert report.failure == failed.failure
    assert report.notices == ["no cache"]


def test_a_draft_keeps_its_evidence(attempt: Attempt) -> None:
    draft = Report(attempt=4, stage="only", exit_code=0, step=20, measurements={Measurement.FINAL_LOSS: 0.5})
    report = ending.complete(
        draft, attempt=attempt, outcome=PodOutcome(code=ExitCode.DONE), progress=progress(), notices=[]
    )
    assert report == draft


def test_a_crash_after_the_warm_up_reports_the_compiled_code_and_the_progress(attempt: Attempt) -> None:
    archive = CacheArchive(key="torch-2.15.0", digest="a" * 64, num_bytes=9)
    memory = [MemoryPrediction(stage="only", predicted_bytes=1)]
    early = Report(attempt=4, stage="only", exit_code=1, compile_cache=archive, memory=memory, notices=["slow"])
    killed = PodOutcome(code=ExitCode.KILLED)
    report = ending.complete(early, attempt=attempt, outcome=killed, progress=progress(checkpointStep=10), notices=[])
    assert (report.compile_cache, report.memory, report.notices) == (archive, memory, ["slow"])
    assert (report.step, report.mode, report.exit_code) == (12, Mode.COMPILED, 137)
    assert report.checkpoint == CheckpointRef(attempt=4, step=10)


@pytest.mark.parametrize("text", ["{", "", '{"attempt": 4}', '{"attempt":3,"stage":"only","exitCode":0}'])
def test_a_useless_draft_is_named_not_used(tmp_path: Path, attempt: Attempt, text: str) -> None:
    (tmp_path / REPORT_FILE).write_text(text)
    report, notice = ending.read_draft(tmp_path, attempt)
    assert report is None
    assert notice is not None
    assert "report" in notice


def test_no_draft_is_no_news(tmp_path: Path, attempt: Attempt) -> None:
    assert ending.read_draft(tmp_path, attempt) == (None, None)


def test_the_whole_report_lands_beside_the_checkpoints(tmp_path: Path) -> None:
    report = Report(attempt=1, stage="only", exit_code=0)
    ending.write_report(report, tmp_path / "attempt-00001" / "report.json")
    [written] = (tmp_path / "attempt-00001").iterdir()
    assert json.loads(written.read_text())["exitCode"] == 0
