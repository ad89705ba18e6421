"""What people read, and how seldom it is written."""

from dataclasses import replace

import pytest
from tests.unit.job_story import Story, job_spec

from ctj_api.attempt import Mode
from ctj_api.conditions import REASONS
from ctj_api.status import ConditionStatus, ConditionType, Phase, StagePhase
from ctj_operator.core.observed import ChildState, Pod, PodPhase
from ctj_operator.core.progress import WRITE_SECONDS


def running(**spec: object) -> Story:
    story = Story(job_spec(**spec))
    story.look()
    story.runs()
    return story


def test_every_condition_is_there_from_first_sight() -> None:
    story = Story()
    story.look()
    found = {one.type: (one.status.value, one.reason) for one in story.status.conditions}
    assert found == {
        ConditionType.ACCEPTED: ("True", "SpecAccepted"),
        ConditionType.ADMITTED: ("Unknown", "NotCreated"),
        ConditionType.RUNNING: ("False", "NotCreated"),
        ConditionType.PROGRESSING: ("True", "Starting"),
        ConditionType.COMPILED: ("Unknown", "NotYetDecided"),
        ConditionType.GATE_PASSED: ("Unknown", "NotEvaluated"),
        ConditionType.DEGRADED: ("False", "AsExpected"),
        ConditionType.HELD: ("False", "NotHeld"),
        ConditionType.SUSPENDED: ("False", "NotSuspended"),
        ConditionType.ROLLED_BACK: ("False", "NotRolledBack"),
        ConditionType.SUCCEEDED: ("False", "NotFinished"),
        ConditionType.FAILED: ("False", "NotFailed"),
    }


def test_every_condition_has_a_closed_list_of_explained_reasons() -> None:
    assert list(REASONS) == list(ConditionType)
    for reasons in REASONS.values():
        assert all(meaning.endswith(".") for meaning in reasons.values())


def test_a_transition_time_moves_with_the_status_only() -> None:
    story = running()
    progressing = story.condition(ConditionType.PROGRESSING)
    story.runs(step=1)
    story.look(after=60)
    later = story.condition(ConditionType.PROGRESSING)
    assert later.reason == "Training" != progressing.reason
    assert later.last_transition_time == progressing.last_transition_time
    before = story.condition(ConditionType.RUNNING)
    story.ends(16)
    assert story.condition(ConditionType.RUNNING).status is ConditionStatus.FALSE
    assert story.condition(ConditionType.RUNNING).last_transition_time > before.last_transition_time


def test_a_job_waits_restarts_runs_and_ends_in_words() -> None:
    story = Story()
    phases = []
    for step in (
        story.look,
        story.runs,
        lambda: story.ends(16),
        story.runs,
        lambda: story.ends(11),
    ):
        step()
        phases.append(story.status.phase)
    assert phases == [Phase.PENDING, Phase.RUNNING, Phase.RESTARTING, Phase.RUNNING, Phase.FAILED]


def test_all_pods_must_be_up_before_an_attempt_runs() -> None:
    story = Story(job_spec(ladder=[{"name": "full", "strategy": "ddp", "nodes": 2, "processesPerNode": 2}]))
    story.look()
    first, second = story.child.pods
    story.put(replace(story.child, pods=(replace(first, phase=PodPhase.RUNNING), second)))
    story.look(after=60)
    assert story.says(ConditionType.RUNNING) == ("False", "PodsPending")
    assert story.status.active_seconds == 0
    story.runs()
    assert story.says(ConditionType.RUNNING) == ("True", "PodsRunning")


def test_a_job_whose_pods_end_one_after_the_other_still_runs_until_all_have() -> None:
    story = running()
    pods = tuple(replace(pod, phase=PodPhase.SUCCEEDED, exit_code=0) for pod in story.child.pods)
    story.put(replace(story.child, pods=pods))  # its Job has not counted them yet
    writes = story.writes
    story.look()
    assert story.writes == writes
    assert story.status.phase is Phase.RUNNING


def test_a_pod_that_cannot_start_is_named_with_its_reason() -> None:
    story = Story()
    story.look()
    pod = Pod(name="pod-0", index=0, phase=PodPhase.PENDING, reason="ImagePullBackOff", message="no such image")
    story.put(replace(story.child, pods=(pod,)))
    story.look()
    assert story.says(ConditionType.DEGRADED) == ("True", "PodsCannotStart")
    assert story.condition(ConditionType.DEGRADED).message == "pod-0: ImagePullBackOff no such image"
    story.runs()
    assert story.says(ConditionType.DEGRADED) == ("False", "AsExpected")


def test_restarts_show_as_degraded_until_a_new_checkpoint() -> None:
    story = running()
    story.ends(16)
    assert story.says(ConditionType.DEGRADED) == ("True", "Restarts")
    story.runs()
    story.ends(143, saved=7)
    assert story.says(ConditionType.DEGRADED) == ("False", "AsExpected")


def test_progress_reaches_status_with_speed_and_rest() -> None:
    story = running()
    story.runs(step=1, step_seconds=2.0)
    story.runs(step=12, step_seconds=2.0)
    story.look(after=WRITE_SECONDS)
    assert (story.status.step, story.status.progress_percentage) == (12, 10)
    assert story.status.estimated_remaining_seconds == 216
    assert story.status.mode is Mode.COMPILED
    assert story.says(ConditionType.COMPILED) == ("True", "Compiled")


def test_progress_alone_is_written_at_most_every_thirty_seconds() -> None:
    story = running()
    story.runs(step=1)
    before = story.writes
    for step in range(2, 92):
        phase = "Saving" if step % 7 == 0 else "Training"
        story.runs(step=step, phase=phase, step_seconds=1.0, checkpoint_step=step)
    assert story.writes - before <= 90 / WRITE_SECONDS + 1


def test_a_transition_is_written_at_once() -> None:
    story = running()
    story.runs(step=1)
    writes = story.writes
    story.runs(step=2, mode=Mode.EAGER)
    assert story.writes == writes + 1
    assert story.stage("single").mode is Mode.EAGER


def test_nothing_new_is_no_write_and_no_event() -> None:
    story = running()
    story.runs(step=1)
    story.look(after=WRITE_SECONDS)
    story.events.clear()
    writes = story.writes
    for _ in range(10):
        story.look(after=0.5)
    assert (story.writes, story.events) == (writes, [])


def test_other_attempts_progress_is_ignored() -> None:
    story = running()
    story.runs(step=99, attempt=7)
    story.look(after=WRITE_SECONDS)
    assert story.status.step == 0


@pytest.mark.parametrize("ended", [ChildState.SUCCEEDED, ChildState.FAILED])
def test_an_ended_job_has_no_current_attempt(ended: ChildState) -> None:
    story = Story(job_spec(ladder=[{"name": "full", "strategy": "ddp"}]))
    story.look()
    story.runs()
    if ended is ChildState.SUCCEEDED:
        story.finishes()
    else:
        story.ends(11)
    assert story.status.current is None
    assert story.status.finished_at is not None
    assert story.says(ConditionType.RUNNING) == ("False", "Finished")
    assert story.says(ConditionType.PROGRESSING) == ("False", "Finished")


def test_lists_in_status_are_bounded() -> None:
    story = Story(job_spec(restart={"maxDisruptions": 1000}))
    story.passes("single")
    story.annotations["training.ctj.dev/force-eager"] = "1"
    for _ in range(70):
        story.runs()
        story.ends(None, disrupted=True)
    assert len(story.status.remedies) == 64
    assert "ForceEager" in [remedy.what for remedy in story.status.remedies], "plain restarts go first"
    assert len(story.stage("ddp").attempts) == 64
    assert story.stage("single").phase is StagePhase.PASSED
    assert len(story.status.model_dump_json(by_alias=True)) < 64_000
