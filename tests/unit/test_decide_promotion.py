"""Up the ladder, and down again: promotion, fall back to eager, rollback, hold."""

import pytest
from tests.unit.job_story import Story, job_spec, short_spec

from ctj_api.attempt import LineageEntry, Mode
from ctj_api.names import VERB_APPROVE
from ctj_api.report import MemoryPrediction
from ctj_api.spec import Measurement
from ctj_api.status import ConditionType, Phase, StagePhase

M = Measurement
BAD_PARITY = {M.REPLAY_LOSS_RELATIVE: 1.0}


def failing_in_eager(story: Story, *, stage: str) -> None:
    """Let a stage show bad evidence compiled, and again eager."""
    for _ in range(2):
        assert story.attempt.stage.name == stage
        story.runs()
        story.finishes(measured=BAD_PARITY)


def test_a_job_goes_through_all_stages_and_succeeds() -> None:
    story = Story()
    story.passes("single", "ddp", "fsdp", "zero3")
    assert story.status.phase is Phase.SUCCEEDED
    assert story.numbers == [1, 2, 3, 4]
    assert {stage.phase for stage in story.status.ladder} == {StagePhase.PASSED}
    assert story.says(ConditionType.SUCCEEDED) == ("True", "AllStagesPassed")
    assert (story.status.step, story.status.progress_percentage) == (120, 100)
    assert story.status.stable is not None
    assert story.status.stable.checkpoint.step == 120
    reasons = [event.reason for event in story.events]
    assert reasons.count("StagePassed") == 3
    assert reasons[-1] == "Succeeded"


def test_a_job_of_one_stage_has_four_writes_its_child_included() -> None:
    story = Story(job_spec(ladder=[{"name": "full", "strategy": "ddp", "processesPerNode": 2}]))
    story.look()
    story.look()
    story.runs()
    story.look()
    story.finishes()
    assert story.status.phase is Phase.SUCCEEDED
    assert story.writes + len(story.attempts) <= 4


def test_the_mode_the_trainer_chose_is_shown_with_its_reason() -> None:
    story = Story(short_spec())
    story.look()
    story.runs()
    story.finishes(mode=Mode.EAGER)
    assert story.stage("single").mode is Mode.EAGER
    assert story.stage("single").phase is StagePhase.PASSED
    assert story.attempt.mode is Mode.COMPILED, "the next stage compares for itself"
    assert story.says(ConditionType.COMPILED) == ("False", "TrainerChoseEager")


def test_a_job_that_does_not_compile_runs_eager() -> None:
    story = Story(short_spec(compile={"scope": "disabled"}))
    story.passes("single", "ddp")
    assert {attempt.mode for attempt in story.attempts} == {Mode.EAGER}
    assert story.says(ConditionType.COMPILED) == ("False", "CompileDisabled")


def test_a_rollback_finishes_in_the_last_good_stage_from_its_last_checkpoint() -> None:
    story = Story()
    story.passes("single", "ddp")
    failing_in_eager(story, stage="fsdp")
    attempt = story.attempt
    assert attempt.stage.name == "ddp"
    assert (attempt.window.start_step, attempt.window.end_step, attempt.floor_step) == (40, 120, 40)
    assert attempt.window.save_at == (120,)
    assert [one.is_last for one in story.attempts] == [False] * (len(story.attempts) - 1) + [True]
    assert attempt.replay is None
    assert LineageEntry(attempt=2, max_step=40) in attempt.lineage
    assert story.stage("fsdp").phase is StagePhase.FAILED
    assert story.stage("zero3").phase is StagePhase.SKIPPED
    assert story.says(ConditionType.ROLLED_BACK) == ("True", "GateFailed")
    story.runs()
    story.finishes()
    assert story.status.phase is Phase.SUCCEEDED
    assert story.says(ConditionType.SUCCEEDED) == ("True", "FinishedAfterRollback")
    assert story.stage("fsdp").phase is StagePhase.FAILED


def test_a_stage_verified_in_eager_is_finished_in_eager_after_a_rollback() -> None:
    story = Story()
    story.look()
    story.runs()
    story.finishes(mode=Mode.EAGER)
    failing_in_eager(story, stage="ddp")
    assert (story.attempt.stage.name, story.attempt.mode) == ("single", Mode.EAGER)


def test_without_a_good_stage_there_is_nothing_to_go_back_to() -> None:
    story = Story()
    story.look()
    for _ in range(2):
        story.runs()
        story.finishes(measured={M.PROBE_LOSS_RELATIVE: 1.0, M.MEMORY_PEAK_RATIO: 0.99})
    assert story.status.phase is Phase.HELD
    assert story.numbers == [1, 2]


def test_a_spent_rollback_budget_holds() -> None:
    story = Story(job_spec(remedies={"maxRollbacks": 0}))
    story.passes("single")
    failing_in_eager(story, stage="ddp")
    assert story.status.phase is Phase.HELD
    assert "0 of 0 rollbacks are used" in story.condition(ConditionType.HELD).message


def test_a_rollback_that_the_deadline_does_not_allow_holds() -> None:
    # 100 steps of 0.5 s are left in `single`; the deadline leaves less.
    story = Story(job_spec(activeDeadlineSeconds=60))
    story.passes("single")
    failing_in_eager(story, stage="ddp")
    assert story.status.phase is Phase.HELD
    assert "longer than the deadline leaves" in story.condition(ConditionType.HELD).message


def test_days_of_the_last_stage_are_not_thrown_away_without_a_person() -> None:
    story = Story(short_spec(training={"steps": 100_000}))
    story.passes("single")
    failing_in_eager(story, stage="ddp")
    assert story.status.phase is Phase.HELD
    assert "would repeat 13.9 h of training" in story.condition(ConditionType.HELD).message


def test_a_spent_fallback_budget_leads_to_the_gates_own_answer() -> None:
    story = Story(job_spec(remedies={"maxFallbacks": 0}))
    story.passes("single")
    story.runs()
    story.finishes(measured=BAD_PARITY)
    assert story.attempt.stage.name == "single"
    assert story.status.fallbacks_used == 0


@pytest.mark.parametrize("measurement", [M.RECOMPILES_AFTER_WARMUP, M.MEMORY_PEAK_RATIO])
def test_recompiles_and_memory_pressure_lead_to_eager_and_then_to_a_person(measurement: Measurement) -> None:
    story = Story()
    story.look()
    story.runs()
    story.finishes(measured={measurement: 50.0})
    assert story.attempt.mode is Mode.EAGER
    story.runs()
    story.finishes(measured={M.MEMORY_PEAK_RATIO: 50.0})
    assert story.status.phase is Phase.HELD


def test_stages_that_cannot_fit_are_skipped_but_the_last_is_tried() -> None:
    story = Story()
    story.look()
    story.runs()
    gib = 2**30
    predictions = [
        MemoryPrediction(stage=name, predicted_bytes=needed * gib, limit_bytes=8 * gib)
        for name, needed in (("single", 7), ("ddp", 9), ("fsdp", 10), ("zero3", 11))
    ]
    story.finishes(memory=predictions)
    assert story.attempt.stage.name == "zero3"
    assert [story.stage(name).phase for name in ("ddp", "fsdp")] == [StagePhase.SKIPPED] * 2
    assert "needs about 9.00 GiB per process and has 8.00 GiB" in story.stage("ddp").message
    assert story.attempt.replay is not None
    assert story.attempt.replay.attempt == 1, "compared with the last stage that ran"


# Held


def held_story(**remedies: object) -> Story:
    story = Story(job_spec(remedies=remedies))
    story.passes("single")
    story.runs()
    story.finishes(measured={M.REPLAY_LOSS_RELATIVE: None})
    assert story.status.phase is Phase.HELD
    return story


def test_a_held_job_has_no_child_and_waits() -> None:
    story = held_story()
    decision = story.look()
    assert story.numbers == [1, 2]
    assert decision.status.phase is Phase.HELD
    assert decision.requeue_after is not None
    assert 86_000 < decision.requeue_after <= 86_400


def test_approval_promotes_past_the_held_gate_and_says_so() -> None:
    story = held_story()
    story.annotations[VERB_APPROVE] = "alice-1"
    story.look()
    assert story.attempt.stage.name == "fsdp"
    assert story.stage("ddp").phase is StagePhase.PASSED
    assert "approved by a person although parity: replayLossRelative was not measured" in story.stage("ddp").message
    assert story.says(ConditionType.HELD) == ("False", "NotHeld")
    assert story.says(ConditionType.GATE_PASSED) == ("True", "Approved")


def test_an_unanswered_hold_fails() -> None:
    story = held_story(hold={"timeout": "1h30m"})
    story.look(after=5399)
    assert story.status.phase is Phase.HELD
    story.look(after=2)
    assert story.says(ConditionType.FAILED) == ("True", "HoldTimeout")


def test_an_unanswered_hold_may_roll_back_instead() -> None:
    story = held_story(hold={"timeout": "1h", "onTimeout": "Rollback"})
    story.look(after=3601)
    assert (story.attempt.stage.name, story.attempt.window.end_step) == ("single", 120)
    assert story.says(ConditionType.ROLLED_BACK) == ("True", "HoldTimeout")


def test_an_unanswered_hold_of_the_first_stage_fails_for_want_of_a_way_back() -> None:
    story = Story(job_spec(remedies={"hold": {"timeout": "1h", "onTimeout": "Rollback"}}))
    story.look()
    story.runs()
    story.finishes(measured={M.MEMORY_PEAK_RATIO: None})
    story.look(after=3601)
    assert story.says(ConditionType.FAILED) == ("True", "HoldTimeout")


def test_the_hold_clock_stands_still_while_the_job_is_suspended() -> None:
    story = held_story(hold={"timeout": "1h"})
    story.edit(suspend=True)
    story.look(after=7200)
    assert story.status.phase is Phase.HELD
    assert story.numbers == [1, 2]
