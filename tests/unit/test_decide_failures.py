"""What follows when an attempt dies: restarts and their budgets, remedies, and the end."""

from dataclasses import replace

import pytest
from tests.unit.job_story import Story, job_spec, short_spec

from ctj_api.attempt import Mode
from ctj_api.exit_codes import ExitCode
from ctj_api.status import ConditionType, Phase, StagePhase
from ctj_operator.core.observed import ChildState, PodPhase


def started(**spec: object) -> Story:
    story = Story(job_spec(**spec))
    story.look()
    story.runs()
    return story


def die_until_the_end(story: Story, exit_code: int | None, **pod: object) -> None:
    for _ in range(100):
        if story.status.phase is Phase.FAILED:
            return
        story.runs()
        story.ends(exit_code, **pod)
    raise AssertionError("it never ends")


@pytest.mark.parametrize("exit_code", [12, 15, 16, 137])
def test_a_limit_of_two_means_three_attempts(exit_code: int) -> None:
    story = started(restart={"maxFailures": 2})
    die_until_the_end(story, exit_code)
    assert story.numbers == [1, 2, 3]
    assert story.says(ConditionType.FAILED) == ("True", "RetryLimit")
    assert story.status.restarts.failures == 2


@pytest.mark.parametrize(
    ("exit_code", "reason"),
    [(1, "UserCodeOrImage"), (10, "Configuration"), (11, "UserCode"), (17, "CompileFailed"), (3, "UserCodeOrImage")],
)
def test_what_would_happen_again_is_not_tried_again(exit_code: int, reason: str) -> None:
    story = started()
    story.ends(exit_code)
    assert story.numbers == [1]
    assert story.says(ConditionType.FAILED) == ("True", reason)
    failure = story.status.first_failure
    assert failure is not None
    assert (failure.pod, failure.exit_code, failure.attempt, failure.last_lines) == ("pod-0", exit_code, 1, "last line")
    assert f"exit code {exit_code}" in story.condition(ConditionType.FAILED).message


@pytest.mark.parametrize(
    "pod",
    [
        {"exit_code": None, "reason": "Evicted"},
        {"exit_code": 137, "disrupted": True},
        {"exit_code": 143, "disrupted": True},
    ],
)
def test_disruptions_have_a_budget_of_their_own(pod: dict[str, object]) -> None:
    story = started(restart={"maxFailures": 0, "maxDisruptions": 4})
    die_until_the_end(story, **pod)  # type: ignore[arg-type]
    assert story.numbers == [1, 2, 3, 4, 5]
    assert story.says(ConditionType.FAILED) == ("True", "DisruptionLimit")
    assert story.status.restarts.failures == 0


def test_a_new_checkpoint_gives_new_budgets() -> None:
    story = started(restart={"maxFailures": 1})
    for step in (10, 11, 15):
        story.ends(16, saved=step)
        story.runs()
    assert (story.status.restarts.failures, story.status.restarts.since_step) == (1, 15)
    story.ends(16, saved=15)
    assert story.says(ConditionType.FAILED) == ("True", "RetryLimit"), "an old checkpoint is no progress"


def test_a_checkpoint_seen_in_progress_counts_although_the_pod_left_no_report() -> None:
    story = started(restart={"maxFailures": 0})
    story.runs(step=12, checkpoint_step=10)
    story.ends(137)
    assert story.status.phase is Phase.FAILED, "no budget at all: even the first failure is one too many"
    story = started(restart={"maxFailures": 1})
    story.runs(step=12, checkpoint_step=10)
    story.ends(137)
    story.runs(step=14, checkpoint_step=12)
    story.ends(137)
    assert story.status.restarts.failures == 1
    assert story.numbers == [1, 2, 3]


def test_passing_a_stage_gives_new_budgets() -> None:
    story = started(restart={"maxFailures": 1})
    story.ends(16)
    story.runs()
    story.finishes()
    assert story.attempt.stage.name == "ddp"
    assert story.status.restarts.failures == 0
    assert story.status.restarts.total == 1


def test_a_stop_from_outside_that_saved_is_not_counted() -> None:
    story = started(restart={"maxFailures": 0, "maxDisruptions": 0})
    story.ends(143, saved=8)
    assert story.numbers == [1, 2]
    assert (story.status.restarts.failures, story.status.restarts.disruptions) == (0, 0)


def test_stops_from_outside_before_anything_is_saved_are_not_endless() -> None:
    story = started(restart={"maxDisruptions": 2})
    die_until_the_end(story, 143)
    assert story.numbers == [1, 2, 3]
    assert story.says(ConditionType.FAILED) == ("True", "DisruptionLimit")


def test_the_root_cause_is_told_from_its_victims() -> None:
    """Rank 3's pod raised; the others lost their peer, and one of them ended first."""
    story = Story(job_spec(ladder=[{"name": "full", "strategy": "ddp", "nodes": 2, "processesPerNode": 2}]))
    story.look()
    story.runs()
    first, second = story.child.pods
    now = story.now
    victim = replace(first, phase=PodPhase.FAILED, exit_code=15, finished_at=now + 1)
    cause = replace(second, phase=PodPhase.FAILED, exit_code=11, finished_at=now + 2)
    story.put(replace(story.child, state=ChildState.FAILED, pods=(victim, cause)))
    story.look(after=5)
    assert story.says(ConditionType.FAILED) == ("True", "UserCode")
    assert story.status.first_failure is not None
    assert story.status.first_failure.pod == "pod-1"


# Out of memory


@pytest.mark.parametrize("pod", [{"exit_code": 13}, {"exit_code": 137, "reason": "OOMKilled"}])
def test_out_of_memory_halves_the_micro_batch_and_keeps_the_global_one(pod: dict[str, object]) -> None:
    story = started()
    story.ends(**pod)  # type: ignore[arg-type]
    assert (story.attempt.micro_batch_size, story.attempt.training.global_batch_size) == (2, 16)
    assert story.attempt.stage.name == "single"
    assert story.status.restarts.failures == 0
    story.runs()
    story.ends(13)
    assert story.attempt.micro_batch_size == 1


def test_with_the_smallest_micro_batch_the_next_more_sharded_stage_follows() -> None:
    story = started(training={"microBatchSize": 1})
    story.ends(13)
    assert story.attempt.stage.name == "fsdp", "ddp needs as much memory per process as single"
    assert [story.stage(name).phase for name in ("single", "ddp")] == [StagePhase.SKIPPED] * 2
    assert (story.attempt.window.start_step, story.attempt.window.end_step, story.attempt.replay) == (0, 60, None)


def test_more_sharding_continues_from_the_last_good_stage() -> None:
    story = started(training={"microBatchSize": 1})
    story.finishes()
    story.runs()
    story.ends(13)
    assert story.attempt.stage.name == "fsdp"
    assert story.attempt.window.start_step == 15
    assert story.attempt.replay is not None
    assert story.attempt.replay.attempt == 1


def test_an_odd_micro_batch_is_halved_though_the_half_does_not_divide_the_global_batch() -> None:
    story = started(training={"microBatchSize": 5, "globalBatchSize": 30})
    story.ends(13)
    assert (story.attempt.micro_batch_size, story.attempt.stage.name) == (2, "single"), "15 = 7 x 2 + 1 works as well"
    story.runs()
    story.ends(13)
    assert (story.attempt.micro_batch_size, story.attempt.stage.name) == (1, "single")
    assert story.attempt.training.global_batch_size == 30


def test_out_of_memory_with_nothing_left_to_try_fails() -> None:
    story = Story(short_spec(training={"microBatchSize": 1}))
    story.look()
    story.runs()
    story.ends(13)
    assert story.says(ConditionType.FAILED) == ("True", "OutOfMemory")


# Not finite


def test_a_non_finite_loss_leads_to_eager_from_the_last_finite_checkpoint_once() -> None:
    story = started()
    story.ends(14, saved=10)
    assert (story.attempt.attempt, story.attempt.mode) == (2, Mode.EAGER)
    assert story.attempt.lineage[-1].attempt == 1
    story.runs()
    story.ends(14, saved=12)
    assert story.says(ConditionType.FAILED) == ("True", "NonFinite")
    assert story.numbers == [1, 2]


# Absence


def test_a_child_that_vanishes_is_a_disruption_and_gets_a_new_number() -> None:
    story = started()
    story.vanishes()
    assert story.numbers == [1, 2]
    assert story.status.restarts.disruptions == 1
    assert story.status.remedies[-1].reason == "ChildMissing"


def test_every_exit_code_of_the_contract_leads_somewhere() -> None:
    for exit_code in ExitCode:
        if exit_code is ExitCode.DONE:
            continue
        story = started()
        story.ends(int(exit_code))
        assert story.status.current is not None or story.status.phase is Phase.FAILED
