"""What people ask for beside the spec, each token once; and the retry token."""

import pytest
from tests.unit.job_story import Story, job_spec, short_spec

from ctj_api.attempt import Mode
from ctj_api.control import CompileControl, StopControl
from ctj_api.names import VERB_APPROVE, VERB_FORCE_EAGER, VERB_RETRY_COMPILE, VERB_ROLLBACK, VERBS
from ctj_api.spec import Measurement
from ctj_api.status import ConditionType, Phase, StagePhase

M = Measurement


def running(**spec: object) -> Story:
    story = Story(job_spec(**spec))
    story.look()
    story.runs(step=3)
    return story


def test_force_eager_reaches_the_running_attempt_and_later_ones() -> None:
    story = running()
    story.annotations[VERB_FORCE_EAGER] = "1"
    story.look()
    assert story.control is not None
    assert (story.control.compile, story.control.stop) == (CompileControl.EAGER, StopControl.NONE)
    story.runs(step=4, mode=Mode.EAGER)
    assert story.says(ConditionType.COMPILED) == ("False", "FellBack")
    story.finishes(mode=Mode.EAGER)
    assert (story.attempt.stage.name, story.attempt.mode) == ("ddp", Mode.EAGER)
    assert story.status.fallbacks_used == 0, "a person's wish costs no budget"


def test_retry_compile_starts_again_and_measures_afresh() -> None:
    story = running()
    story.annotations[VERB_FORCE_EAGER] = "1"
    story.look()
    story.runs(step=4, mode=Mode.EAGER)
    story.annotations[VERB_RETRY_COMPILE] = "1"
    story.look()
    assert story.control is not None
    assert story.control.stop is StopControl.CHECKPOINT
    story.ends(143, saved=5)
    assert (story.attempt.attempt, story.attempt.mode, story.attempt.retry_compile) == (2, Mode.COMPILED, True)
    story.runs()
    story.ends(16, saved=7)
    assert not story.attempt.retry_compile, "the new verdict is reused like any other"


def test_retry_compile_of_a_compiled_stage_does_nothing() -> None:
    story = running()
    story.annotations[VERB_RETRY_COMPILE] = "1"
    story.look()
    assert story.control is None
    assert story.events[-1].reason == "NothingToDo"


def test_rollback_stops_the_attempt_and_goes_back_whatever_the_budget() -> None:
    story = Story(job_spec(remedies={"maxRollbacks": 0}))
    story.passes("single")
    story.runs()
    story.annotations[VERB_ROLLBACK] = "1"
    story.look()
    assert story.numbers == [1, 2]
    story.ends(143, saved=30)
    assert (story.attempt.stage.name, story.attempt.window.start_step) == ("single", 20)
    assert story.says(ConditionType.ROLLED_BACK) == ("True", "Requested")


def test_rollback_wins_although_the_stage_finishes_meanwhile() -> None:
    story = Story()
    story.passes("single")
    story.runs()
    story.annotations[VERB_ROLLBACK] = "1"
    story.look()
    story.finishes()
    assert story.attempt.stage.name == "single"


def test_rollback_of_a_held_job_needs_no_stop() -> None:
    story = Story()
    story.passes("single")
    story.runs()
    story.finishes(measured={M.REPLAY_LOSS_RELATIVE: None})
    story.annotations[VERB_ROLLBACK] = "1"
    story.look()
    assert (story.attempt.stage.name, story.attempt.attempt) == ("single", 3)


@pytest.mark.parametrize("verb", [VERB_APPROVE, VERB_ROLLBACK])
def test_a_verb_with_nothing_to_do_is_answered_once(verb: str) -> None:
    story = running()
    story.annotations[verb] = "1"
    story.look()
    story.look()
    assert [event.reason for event in story.events].count("NothingToDo") == 1
    assert story.status.handled[verb] == "1"
    assert story.numbers == [1]


def test_a_token_acts_once_and_a_new_one_acts_again() -> None:
    story = running()
    story.annotations[VERB_FORCE_EAGER] = "1"
    story.look()
    story.annotations[VERB_RETRY_COMPILE] = "1"
    story.runs(step=4, mode=Mode.EAGER)
    story.ends(143, saved=5)
    story.runs(step=6)
    assert story.status.current is not None
    assert story.status.current.compile_control is Mode.COMPILED, "force-eager 1 was handled"
    story.annotations[VERB_FORCE_EAGER] = "2"
    story.look()
    assert story.status.current.compile_control is Mode.EAGER
    assert story.control is not None
    assert story.control.attempt == 2


def test_tokens_after_the_end_do_not_act_after_a_retry() -> None:
    story = running()
    story.ends(11)
    for verb in VERBS:
        story.annotations[verb] = "late"
    story.look()
    assert story.status.phase is Phase.FAILED
    story.edit(retryToken="again")
    story.look()
    assert story.numbers == [1, 2]
    assert story.attempt.mode is Mode.COMPILED


def ended(kind: ConditionType) -> Story:
    story = running()
    if kind is ConditionType.FAILED:
        story.ends(11)
        return story
    story.finishes()
    story.passes("ddp", "fsdp", "zero3")
    return story


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", [ConditionType.SUCCEEDED, ConditionType.FAILED])
def test_a_verb_after_the_end_is_remembered_and_answered_once_with_the_reason(verb: str, kind: ConditionType) -> None:
    story = ended(kind)
    story.annotations[verb] = "late"
    told = [event for _ in range(2) for event in story.look().events]
    assert [event.reason for event in told] == ["NothingToDo"]
    assert told[0].message.startswith(f"{verb.rpartition('/')[2]} is ignored: the job has {kind.lower()}")
    assert story.status.handled[verb] == "late"


def test_a_retry_token_that_can_start_nothing_is_answered_once_with_the_reason() -> None:
    for story, why in ((running(), "has not failed and is not held"), (ended(ConditionType.SUCCEEDED), "succeeded")):
        story.edit(retryToken="again")
        told = [event for _ in range(2) for event in story.look().events if event.reason == "NothingToDo"]
        assert len(told) == 1
        assert told[0].message.startswith("spec.retryToken is ignored")
        assert why in told[0].message


def test_what_is_asked_together_with_a_retry_acts_once_the_job_runs_again() -> None:
    story = ended(ConditionType.FAILED)
    story.edit(retryToken="again")
    story.annotations[VERB_FORCE_EAGER] = "1"
    story.look()
    assert (story.attempt.attempt, story.attempt.mode) == (2, Mode.EAGER)


# Retry


def test_a_retry_token_gives_a_failed_job_new_budgets_and_its_newest_checkpoint() -> None:
    story = running(restart={"maxFailures": 0})
    story.ends(16, saved=9)
    assert story.status.phase is Phase.FAILED
    story.look(after=100)
    assert story.numbers == [1]
    story.edit(retryToken="2026-07-01")
    story.look()
    assert story.numbers == [1, 2]
    assert story.attempt.lineage[-1].attempt == 1
    assert story.says(ConditionType.FAILED) == ("False", "NotFailed")
    assert story.status.finished_at is None
    story.look(after=1000)
    assert story.numbers == [1, 2], "one token, one retry"


def test_a_retry_token_lets_a_held_stage_run_again_from_its_start() -> None:
    story = Story(short_spec())
    story.passes("single")
    story.runs()
    story.finishes(measured={M.REPLAY_LOSS_RELATIVE: None})
    assert story.status.phase is Phase.HELD
    story.edit(retryToken="again")
    story.look()
    assert (story.attempt.stage.name, story.attempt.attempt) == ("ddp", 3)
    assert [entry.attempt for entry in story.attempt.lineage] == [1]
    assert story.attempt.retry_compile
    story.runs()
    story.finishes()
    assert story.status.phase is Phase.SUCCEEDED


def test_a_retry_token_does_nothing_to_a_running_or_succeeded_job() -> None:
    story = running()
    story.edit(retryToken="a")
    story.look()
    assert story.numbers == [1]
    story.finishes()
    story.passes("ddp", "fsdp", "zero3")
    story.edit(retryToken="b")
    story.look()
    assert story.status.phase is Phase.SUCCEEDED
    assert story.numbers == [1, 2, 3, 4]


def test_a_stage_failed_by_its_gate_runs_again_on_retry() -> None:
    gate = {"name": "final", "source": {"report": "finalLoss"}, "thresholdRange": {"max": "1"}, "onFailure": "Fail"}
    story = Story(short_spec(gates=[gate]))
    story.look()
    story.runs()
    story.finishes(measured={M.FINAL_LOSS: 2.0})
    assert story.status.phase is Phase.FAILED
    story.edit(retryToken="again", gates=[])
    story.look()
    assert story.attempt.stage.name == "single"
    assert story.attempt.lineage == []
    story.runs()
    story.finishes()
    assert story.stage("single").phase is StagePhase.PASSED


def test_two_rollbacks_asked_for_while_suspended_go_back_once() -> None:
    story = Story(job_spec(remedies={"maxRollbacks": 5}))
    story.passes("single")
    story.runs()
    story.edit(suspend=True)
    story.look()
    story.ends(143, saved=30)
    for token in ("1", "2"):
        story.annotations[VERB_ROLLBACK] = token
        story.look()
    assert story.status.rollbacks_used == 1
    assert story.status.stage == "single"


def test_a_retry_after_a_deadline_between_two_stages_goes_on_with_the_next_stage() -> None:
    story = running(activeDeadlineSeconds=5)
    story.finishes(after=10)
    assert story.status.phase is Phase.FAILED
    story.edit(retryToken="again", activeDeadlineSeconds=500)
    story.look()
    assert story.attempt.stage.name == "ddp"
    assert story.stage("single").phase is StagePhase.PASSED
