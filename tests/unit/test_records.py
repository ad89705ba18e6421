"""What a rank remembers of its steps is bounded, and never forgets what its evidence needs."""

from ctj_api.attempt import Mode
from ctj_trainer.records import StepRecord, forget_old


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        stage="full",
        attempt=3,
        loss=2.0,
        grad_norm=1.0,
        learning_rate=1e-3,
        seconds=0.2,
        mode=Mode.COMPILED,
        tokens=64,
    )


def test_a_long_stage_keeps_its_replay_window_and_its_newest_steps() -> None:
    records: dict[int, StepRecord] = {}
    for step in range(16, 100):
        records[step] = record(step)
        forget_old(records, replay_until=20, most=10)

    assert sorted(records) == [16, 17, 18, 19, 20, 95, 96, 97, 98, 99]


def test_a_window_longer_than_the_memory_is_kept_whole() -> None:
    records = {step: record(step) for step in range(1, 31)}
    forget_old(records, replay_until=30, most=10)

    assert sorted(records) == list(range(1, 31))
