"""Suspend and resume, spec edits, deadlines: why a running attempt stops, and what follows."""

from dataclasses import replace

import pytest
from tests.unit.job_story import Story, job_spec

from ctj_api.control import StopControl
from ctj_api.status import ConditionType, Phase
from ctj_operator.core.observed import ChildState, PodPhase
from ctj_operator.core.stopping import PATIENCE_SECONDS


def running(**spec: object) -> Story:
    story = Story(job_spec(**spec))
    story.look()
    story.runs()
    return story


def suspended(story: Story) -> Story:
    story.edit(suspend=True)
    story.look()
    story.ends(143, saved=8)
    assert story.status.phase is Phase.SUSPENDED
    return story


# Suspend


def test_suspend_asks_for_a_checkpoint_first_and_then_frees_everything() -> None:
    story = running()
    story.edit(suspend=True)
    decision = story.look()
    assert story.control is not None
    assert (story.control.attempt, story.control.sequence, story.control.stop) == (1, 1, StopControl.CHECKPOINT)
    assert decision.delete == ()
    assert story.says(ConditionType.SUSPENDED) == ("False", "Stopping")
    story.look()
    assert story.numbers == [1]
    story.ends(143, saved=8)
    assert story.children == [], "pods gone"
    assert story.status.phase is Phase.SUSPENDED
    assert story.says(ConditionType.SUSPENDED) == ("True", "SuspendRequested")
    assert story.says(ConditionType.PROGRESSING) == ("False", "Suspended")


def test_resume_is_a_new_uncounted_attempt_from_the_newest_checkpoint() -> None:
    story = suspended(running(restart={"maxFailures": 0, "maxDisruptions": 0}))
    story.look(after=100_000)
    assert story.numbers == [1]
    story.edit(suspend=False)
    story.look()
    assert story.numbers == [1, 2]
    assert story.attempt.lineage[-1].attempt == 1
    restarts = story.status.restarts
    assert (restarts.failures, restarts.disruptions, restarts.total) == (0, 0, 0)


@pytest.mark.parametrize("exit_code", [143, 16, 11, 13, 14, 137, None])
def test_however_a_stopping_attempt_ends_the_job_is_suspended_and_nothing_is_counted(exit_code: int | None) -> None:
    story = running(restart={"maxFailures": 0, "maxDisruptions": 0})
    story.edit(suspend=True)
    story.look()
    story.ends(exit_code)
    assert story.status.phase is Phase.SUSPENDED
    assert story.status.restarts.failures == story.status.restarts.disruptions == 0


def test_a_stage_that_finishes_while_it_is_stopped_is_promoted_and_the_next_waits() -> None:
    story = running()
    story.edit(suspend=True)
    story.look()
    story.finishes()
    assert story.status.phase is Phase.SUSPENDED
    assert story.numbers == [1]
    assert story.status.stable is not None
    story.edit(suspend=False)
    story.look()
    assert story.attempt.stage.name == "ddp"


def test_a_job_created_suspended_starts_nothing() -> None:
    story = Story(job_spec(suspend=True))
    story.look()
    assert story.attempts == []
    assert story.status.attempt == 0
    assert story.status.phase is Phase.SUSPENDED


def test_pods_that_have_not_started_have_nothing_to_save() -> None:
    story = Story()
    story.look()
    story.edit(suspend=True)
    story.look()
    assert story.children == []
    story.look()
    assert story.status.phase is Phase.SUSPENDED
    assert story.status.restarts.disruptions == 0


def test_pods_that_do_not_obey_are_deleted_after_a_while() -> None:
    story = running()
    story.edit(suspend=True)
    story.look()
    assert story.look(after=PATIENCE_SECONDS - 1).delete == ()
    assert story.look(after=2).delete == ("uid-1",)
    assert any(event.reason == "StopTimeout" for event in story.events)
    story.look()
    assert story.status.phase is Phase.SUSPENDED


def test_suspension_by_the_queue_is_not_ours_and_not_a_failure() -> None:
    story = running()
    story.put(replace(story.child, suspended=True, pods=()))
    story.look(after=10)
    assert story.status.phase is Phase.QUEUED
    assert story.says(ConditionType.ADMITTED) == ("False", "WaitingForQuota")
    story.look(after=100_000)
    assert story.status.active_seconds == pytest.approx(10), "waiting is not running"
    story.put(replace(story.child, suspended=False, pods=running().child.pods))
    story.look()
    assert story.status.phase is Phase.RUNNING
    assert story.numbers == [1]


# Spec edits


@pytest.mark.parametrize(
    "change",
    [
        {"image": "registry.example/team/llama:2"},
        {"recipe": {"config": {"model": {"layers": 8}}}},
        {"training": {"optimizer": {"learningRate": "1e-4"}}},
        {"compile": {"scope": "full"}},
        {"template": {"env": [{"name": "A", "value": "b"}]}},
    ],
)
def test_an_edit_of_what_pods_are_built_from_makes_a_new_attempt_after_the_old_one_stopped(
    change: dict[str, object],
) -> None:
    story = running(restart={"maxFailures": 0, "maxDisruptions": 0})
    story.edit(**change)
    story.look()
    assert story.numbers == [1]
    assert story.control is not None
    assert story.control.stop is StopControl.CHECKPOINT
    story.ends(143, saved=8)
    assert story.numbers == [1, 2]
    assert story.status.restarts.disruptions == 0
    story.runs()
    story.look()
    assert story.numbers == [1, 2], "once"


@pytest.mark.parametrize(
    "change",
    [
        {"gates": [{"name": "p", "source": {"report": "finalLoss"}, "thresholdRange": {"max": "1"}}]},
        {"remedies": {"maxFallbacks": 5}},
        {"restart": {"maxFailures": 9}},
        {"ttlSecondsAfterFinished": 5},
        {"retryToken": "now"},
        {"training": {"seed": 0}},  # the default, now written out
    ],
)
def test_other_edits_restart_nothing(change: dict[str, object]) -> None:
    story = running()
    story.edit(**change)
    story.look()
    assert story.status.current is not None
    assert story.status.current.stopping == ""
    assert story.status.observed_generation == 2


def test_an_edit_of_a_later_stage_waits_for_it() -> None:
    story = running()
    ladder = [dict(stage) for stage in story.spec["ladder"]]
    ladder[1]["processesPerNode"] = 4
    story.edit(ladder=ladder)
    story.look()
    assert story.status.current is not None
    assert story.status.current.stopping == ""
    story.finishes()
    assert story.attempt.stage.world_size == 4


def test_an_edit_before_the_child_was_seen_still_ends_in_the_new_spec() -> None:
    story = Story()
    story.look()
    story.edit(image="registry.example/team/llama:2")
    story.look()
    story.look()
    assert story.numbers == [1, 2]
    assert story.status.current is not None
    assert story.status.current.generation == 2


# Deadlines


def test_the_active_deadline_counts_running_time_of_all_attempts_and_stops_with_a_checkpoint() -> None:
    story = running(activeDeadlineSeconds=100)
    story.now += 60
    story.ends(16, saved=8)  # 10 s later
    story.look(after=1000)  # waiting does not count
    story.runs()
    decision = story.look(after=20)
    assert decision.requeue_after is not None
    assert decision.requeue_after <= 10
    story.look(after=10)
    assert story.control is not None
    assert story.control.stop is StopControl.CHECKPOINT
    story.ends(143, saved=12)
    assert story.says(ConditionType.FAILED) == ("True", "DeadlineExceeded")


def test_a_job_whose_time_is_over_starts_no_further_stage() -> None:
    story = running(activeDeadlineSeconds=5)
    story.finishes(after=10)
    assert story.says(ConditionType.FAILED) == ("True", "DeadlineExceeded")
    assert story.numbers == [1]


def test_the_pending_deadline_ends_a_wait_for_pods() -> None:
    story = Story(job_spec(pendingDeadlineSeconds=600))
    decision = story.look()
    assert decision.requeue_after is not None
    assert decision.requeue_after <= 600
    story.look(after=599)
    assert story.status.phase is Phase.PENDING
    story.look(after=2)
    assert story.says(ConditionType.FAILED) == ("True", "PendingDeadlineExceeded")
    assert story.children == []


def test_the_pending_deadline_ends_a_start_that_never_comes_to_a_step() -> None:
    story = running(pendingDeadlineSeconds=600)
    story.runs(step=0, phase="Compiling", loss=None)
    story.look(after=600)
    assert story.says(ConditionType.FAILED) == ("True", "PendingDeadlineExceeded")


def test_pods_whose_progress_cannot_be_read_are_not_condemned() -> None:
    story = running(pendingDeadlineSeconds=600)
    story.look(after=10_000)
    assert story.status.phase is Phase.RUNNING


def test_the_pending_deadline_is_over_with_the_first_step() -> None:
    story = running(pendingDeadlineSeconds=600)
    story.runs(step=1)
    story.look(after=10_000)
    assert story.status.phase is Phase.RUNNING


def test_time_to_live_removes_the_job_and_only_a_finished_one() -> None:
    story = running(ttlSecondsAfterFinished=60)
    assert not story.look(after=10_000).delete_job
    story.ends(11)
    assert story.status.phase is Phase.FAILED
    decision = story.look(after=59)
    assert not decision.delete_job
    assert decision.requeue_after == pytest.approx(1, abs=0.1)
    assert story.look(after=2).delete_job


def test_running_time_is_counted_to_the_moment_the_pods_ended() -> None:
    """The operator was down for a day: nobody pays for it."""
    story = Story(job_spec(ladder=[{"name": "full", "strategy": "fsdp", "nodes": 2, "gpusPerNode": 8}]))
    story.look()
    story.runs()
    ended_at = story.now + 50
    pods = [replace(pod, phase=PodPhase.FAILED, exit_code=11, finished_at=ended_at) for pod in story.child.pods]
    story.put(replace(story.child, state=ChildState.FAILED, pods=tuple(pods)))
    story.look(after=86_400)
    assert story.status.active_seconds == pytest.approx(50, abs=0.01)
    assert story.status.gpu_seconds == pytest.approx(800, abs=0.1)
