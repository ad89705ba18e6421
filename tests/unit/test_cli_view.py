"""What a person sees: the same picture in the terminal, in plain lines and for programs."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.workplace import job_document

from ctj_api.attempt import Mode
from ctj_api.report import Progress
from ctj_api.status import CurrentAttempt, Phase, StagePhase, StageStatus, Status
from ctj_operator.cli import words
from ctj_operator.cli.lines import JsonScreen, PlainScreen
from ctj_operator.cli.live import LiveScreen
from ctj_operator.cli.view import build_view
from ctj_operator.core.decision import Event, EventType
from ctj_operator.local.runner import Snapshot
from ctj_operator.local.store import Store, StoredJob

STEP_SEVEN = Progress(
    attempt=2,
    step=7,
    phase="Training",
    mode=Mode.COMPILED,
    loss=4.5,
    grad_norm=1.25,
    step_seconds=0.5,
    graphs=8,
    recompiles=1,
    compile_seconds=12.5,
    memory_used_bytes=640 * 1024**2,
    updated_at=1000.0,
)
CURRENT = CurrentAttempt(
    attempt=2,
    stage="ddp",
    mode=Mode.COMPILED,
    micro_batch_size=2,
    floor_step=5,
    generation=1,
    recorded_at="2026-01-01T00:00:00Z",
    requested_at="2026-01-01T00:00:00Z",
)
SECOND_STAGE = Status(
    phase=Phase.RUNNING,
    stage="ddp",
    step=6,
    attempt=2,
    current=CURRENT,
    ladder=[
        StageStatus(name="single", phase=StagePhase.PASSED, mode=Mode.EAGER, end_step=6),
        StageStatus(name="ddp", phase=StagePhase.RUNNING, start_step=5),
    ],
)


@pytest.fixture
def job(tmp_path: Path) -> StoredJob:
    return Store(tmp_path).submit(job_document())


def at(
    job: StoredJob, *, now: float = 1000.0, status: Status = SECOND_STAGE, progress: Progress | None = STEP_SEVEN
) -> Snapshot:
    return Snapshot(job=job, status=status, progress=progress, now=now)


def test_a_stage_counts_its_own_steps_not_those_it_repeats(job: StoredJob) -> None:
    view = build_view(at(job))
    assert [(row.name, row.done, row.total) for row in view.stages] == [("single", 6, 6), ("ddp", 1, 6)]


def test_repeating_the_previous_stage_counts_as_nothing_done_yet(job: StoredJob) -> None:
    repeating = STEP_SEVEN.model_copy(update={"step": 5})
    assert build_view(at(job, progress=repeating)).stages[1].done == 0


def test_a_stopped_stage_shows_how_far_it_came(job: StoredJob) -> None:
    stopped = SECOND_STAGE.model_copy(update={"current": None, "step": 9, "phase": Phase.SUSPENDED})
    view = build_view(at(job, status=stopped, progress=None))
    assert (view.stages[1].done, view.activity) == (3, "")


def test_a_trainer_that_still_loads_does_not_set_the_job_back_to_step_zero(job: StoredJob) -> None:
    loading = STEP_SEVEN.model_copy(update={"step": 0, "phase": "Loading"})
    assert build_view(at(job, status=SECOND_STAGE.model_copy(update={"step": 0}), progress=loading)).step == 5


def test_throughput_and_time_left_follow_from_the_pace(job: StoredJob) -> None:
    view = build_view(at(job))
    assert (view.samples_per_second, view.remaining_seconds) == (16.0, 2.5)


def test_before_the_first_word_of_the_trainer_it_is_starting_and_nothing_is_invented(job: StoredJob) -> None:
    view = build_view(at(job, progress=None))
    assert (view.activity, view.loss, view.remaining_seconds) == ("Starting", None, None)


def test_a_stage_that_got_the_rest_of_a_rolled_back_job_shows_all_of_it(job: StoredJob) -> None:
    ladder = [StageStatus(name="single", phase=StagePhase.RUNNING, end_step=12), StageStatus(name="ddp")]
    current = CURRENT.model_copy(update={"stage": "single"})
    rolled_back = {"ladder": ladder, "current": current, "stage": "single"}
    view = build_view(at(job, status=SECOND_STAGE.model_copy(update=rolled_back)))
    assert (view.stages[0].done, view.stages[0].total) == (7, 12)


def test_the_terminal_shows_ladder_figures_and_events_within_80_columns(job: StoredJob) -> None:
    out = io.StringIO()
    with LiveScreen(Console(file=out, width=80, force_terminal=True, color_system=None)) as screen:
        screen.event(Event(type=EventType.WARNING, reason="Fallback", message="stage ddp runs eager"))
        screen.show(at(job, now=1060.0))
    shown = " ".join(out.getvalue().split())  # a line may be folded anywhere
    for part in (
        "single",
        "6/6",
        "1/6",
        "loss 4.5",
        "recompiles 1",
        "compile 12 s",
        "Fallback",
        "no word from the trainer for 1m 00s",
    ):
        assert part in shown


def test_plain_lines_carry_no_control_codes_and_repeat_nothing(job: StoredJob) -> None:
    out = io.StringIO()
    screen = PlainScreen(out)
    screen.event(Event(type=EventType.WARNING, reason="Fallback", message="stage ddp runs eager"))
    for now in (1000.0, 1000.1, 1007.0, 1014.0):
        screen.show(at(job, now=now))
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert "WARNING Fallback: stage ddp runs eager" in lines[0]
    assert "ddp step 7/12 Training (compiled): loss 4.5, grad norm 1.25, 16 samples/s, 1 recompile" in lines[1]
    assert "\x1b" not in out.getvalue()


def test_json_lines_carry_the_trainers_own_message(job: StoredJob) -> None:
    out = io.StringIO()
    screen = JsonScreen(out)
    screen.show(at(job))
    screen.show(at(job, now=1002.0))
    (line,) = (json.loads(text) for text in out.getvalue().splitlines())
    assert (line["kind"], line["stage"], line["step"], line["loss"]) == ("progress", "ddp", 7, 4.5)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.25, "0.2 s"), (42.4, "42 s"), (100, "1m 40s"), (3599.7, "1h 00m"), (7500, "2h 05m")],
)
def test_durations_read_naturally(seconds: float | None, text: str) -> None:
    assert words.duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(None, "-"), (512, "512 B"), (640 * 1024**2, "640 MiB"), (3 * 1024**3, "3.0 GiB")]
)
def test_sizes_read_naturally(count: int | None, text: str) -> None:
    assert words.size(count) == text
