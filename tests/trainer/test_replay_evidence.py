"""What a stage's report says about replay, speed and finiteness, from step records alone."""

import math
from pathlib import Path

from tests.trainer.messages import attempt

from ctj_api.attempt import Attempt, Mode, Replay
from ctj_api.spec import Measurement
from ctj_trainer.evidence import RankFigures, measure, replay_differences
from ctj_trainer.records import RecordWriter, StepRecord, read_records, stage_history

REPLAY = Replay(attempt=1, from_step=9, to_step=12)
FIGURES = RankFigures(memory_peak_ratio=0.5, recompiles_after_warmup=0, graph_breaks=0, compile_seconds=2.0)


def record(step: int, *, loss: float = 2.0, **changes: object) -> StepRecord:
    facts = {
        "step": step,
        "stage": "ddp",
        "attempt": 1,
        "loss": loss,
        "gradNorm": 1.0,
        "learningRate": 1e-3,
        "seconds": 0.5,
        "mode": "Compiled",
        "tokens": 100,
    }
    return StepRecord.from_document(facts | changes)


def records(steps: range, **changes: object) -> dict[int, StepRecord]:
    return {step: record(step, **changes) for step in steps}


def test_replay_reports_the_largest_relative_differences_of_the_window() -> None:
    reference = records(range(1, 13))
    ours = records(range(10, 20))
    ours[11] = record(11, loss=2.02)
    ours[12] = record(12, gradNorm=0.5)
    ours[15] = record(15, loss=99.0)  # after the window
    differences = replay_differences(reference, ours, REPLAY)
    assert math.isclose(differences[Measurement.REPLAY_LOSS_RELATIVE], 0.01)
    assert math.isclose(differences[Measurement.REPLAY_GRAD_NORM_RELATIVE], 0.5)


def test_a_window_with_a_gap_is_no_evidence() -> None:
    assert replay_differences(records(range(1, 12)), records(range(10, 20)), REPLAY) == {}
    assert replay_differences(records(range(1, 13)), records(range(11, 20)), REPLAY) == {}


def test_a_replayed_loss_that_is_no_number_differs_without_limit() -> None:
    ours = records(range(10, 13)) | {11: record(11, loss=math.nan)}
    differences = replay_differences(records(range(1, 13)), ours, REPLAY)
    assert differences[Measurement.REPLAY_LOSS_RELATIVE] == math.inf


def measured(steps: dict[int, StepRecord], *ranks: RankFigures) -> dict[Measurement, float]:
    message = Attempt.from_document(attempt())
    return measure(message, steps=steps, reference={}, verdict=None, ranks=ranks or (FIGURES,))


def test_times_are_of_the_form_the_stage_ended_in_without_warm_up_and_compilation() -> None:
    steps = records(range(3, 13)) | {1: record(1, seconds=50.0), 2: record(2, seconds=5.0)}
    steps[4] = record(4, seconds=0.1, mode=Mode.EAGER)
    steps[5] = record(5, seconds=9.0, compiling=True)
    found = measured(steps)
    assert found[Measurement.STEP_TIME_P50_SECONDS] == 0.5
    assert found[Measurement.STEP_TIME_P95_SECONDS] == 0.5
    assert found[Measurement.SAMPLES_PER_SECOND_PER_PROCESS] == 8 / 0.5 / 2


def test_the_worst_rank_counts() -> None:
    worse = RankFigures(memory_peak_ratio=0.9, recompiles_after_warmup=2, graph_breaks=1, compile_seconds=3.0)
    found = measured(records(range(1, 5)), FIGURES, worse)
    assert found[Measurement.MEMORY_PEAK_RATIO] == 0.9
    assert found[Measurement.RECOMPILES_AFTER_WARMUP] == 2
    assert found[Measurement.GRAPH_BREAKS] == 1
    assert found[Measurement.COMPILE_SECONDS] == 3.0


def test_what_was_not_measured_is_absent() -> None:
    nothing = RankFigures(memory_peak_ratio=None, recompiles_after_warmup=0, graph_breaks=0, compile_seconds=0.0)
    found = measured({}, nothing)
    assert set(found) == {
        Measurement.NON_FINITE_STEPS,
        Measurement.RECOMPILES_AFTER_WARMUP,
        Measurement.GRAPH_BREAKS,
        Measurement.COMPILE_SECONDS,
    }


def test_steps_that_are_no_number_are_counted() -> None:
    found = measured({1: record(1), 2: record(2, loss=math.nan), 3: record(3, gradNorm=math.inf)})
    assert found[Measurement.NON_FINITE_STEPS] == 2


def test_records_survive_a_kill_and_a_second_writer(tmp_path: Path) -> None:
    first = RecordWriter(tmp_path)
    first.add(record(1))
    first.add(record(2, loss=math.nan))
    first.close()
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"step": 3, "sta')  # killed while writing
    second = RecordWriter(tmp_path)
    second.add(record(2, loss=7.0))
    second.close()
    found = read_records(tmp_path)
    assert sorted(found) == [1, 2]
    assert found[2].loss == 7.0


def test_history_is_one_stage_up_to_the_resumed_step_and_newer_attempts_win(tmp_path: Path) -> None:
    folders = [tmp_path / "1", tmp_path / "2"]
    for number, folder in enumerate(folders, start=1):
        writer = RecordWriter(folder)
        writer.add(record(1, stage="single"))
        for step in range(2, 6):
            writer.add(record(step, loss=float(number)))
        writer.close()
    history = stage_history(folders, stage="ddp", until=4)
    assert {step: r.loss for step, r in history.items()} == {2: 2.0, 3: 2.0, 4: 2.0}
