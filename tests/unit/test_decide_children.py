"""Children that are late, gone, doubled, or somebody else's: never two live attempts, never one lost."""

from dataclasses import replace

from tests.unit.job_story import Story, job_spec

from ctj_api.status import ConditionType, Phase, Status
from ctj_operator.core.decide import KEPT_CHILDREN, decide
from ctj_operator.core.observed import Child, ChildState, Pod, PodPhase
from ctj_operator.core.starting import CREATE_AGAIN_SECONDS


def child(attempt: int, *, state: ChildState = ChildState.ACTIVE, ours: bool = True, stage: str = "single") -> Child:
    pods = (Pod(name=f"pod-{attempt}", index=0, phase=PodPhase.RUNNING),)
    return Child(
        name=f"llama-{stage}-{attempt}", uid=f"other-{attempt}", attempt=attempt, state=state, ours=ours, pods=pods
    )


def test_the_attempt_is_recorded_in_the_pass_that_creates_its_child() -> None:
    story = Story()
    decision = story.look()
    assert decision.create is not None
    assert decision.status.current is not None
    assert decision.create.attempt == decision.status.current.attempt == decision.status.attempt == 1


def test_a_child_that_was_never_seen_is_asked_for_again_under_the_same_name() -> None:
    story = Story()
    story.look()
    story.children = []  # the runner died between writing and creating, or the child is not visible yet
    assert story.look(after=CREATE_AGAIN_SECONDS - 0.1).create is None
    writes = story.writes
    decision = story.look(after=0.2)
    assert decision.create is not None
    assert decision.create.attempt == 1
    assert story.writes == writes + 1, "a runner with an old view fails here, before it revives anything"
    assert story.status.restarts.disruptions == 0


def test_a_child_that_never_appears_is_asked_for_ever_more_rarely() -> None:
    story = Story()
    story.look()
    creates = 0
    for _ in range(720):  # an hour
        story.children = []
        creates += story.look(after=5).create is not None
    assert 5 < creates < 25


def test_a_refused_child_is_told_and_heals_by_itself() -> None:
    story = Story()
    story.look()
    story.children = []
    story.create_error = "jobs.batch is forbidden: exceeded quota"
    story.look()
    assert story.says(ConditionType.DEGRADED) == ("True", "ChildCreateFailed")
    assert "exceeded quota" in story.condition(ConditionType.DEGRADED).message
    story.create_error = ""
    story.look(after=10)
    story.runs()
    assert story.says(ConditionType.DEGRADED) == ("False", "AsExpected")
    assert story.numbers == [1, 1]


def test_a_refused_child_does_not_stand_in_the_way_of_suspending() -> None:
    story = Story()
    story.look()
    story.children = []
    story.create_error = "forbidden"
    story.edit(suspend=True)
    story.look()
    assert story.status.phase is Phase.SUSPENDED


def test_a_child_that_may_exist_unseen_is_seen_before_it_is_given_up() -> None:
    story = Story()
    story.look()
    unseen, story.children = story.children, []
    story.edit(suspend=True)
    story.look()
    assert story.status.phase is not Phase.SUSPENDED
    story.children = unseen
    story.look()
    assert story.children == []
    story.look()
    assert story.status.phase is Phase.SUSPENDED


def test_nothing_starts_beside_a_live_child_of_an_earlier_attempt() -> None:
    story = Story()
    story.look()
    story.runs()
    zombie = story.child
    story.ends(16)
    story.children = [replace(zombie, uid="zombie"), *story.children[1:]]
    decision = story.look()
    assert decision.delete == ("zombie",)
    story.children = [child(2, stage="single"), replace(zombie, uid="zombie", deleting=True)]
    story.put(replace(child(2), state=ChildState.FAILED))
    decision = story.look()
    assert decision.create is None
    assert decision.delete == (), "it is on its way out already"
    assert story.numbers == [1, 2]
    assert story.says(ConditionType.PROGRESSING) == ("True", "CleaningUp")
    story.children = []
    assert story.look().create is not None
    assert story.numbers == [1, 2, 3]


def test_an_unseen_child_is_not_asked_for_while_an_earlier_one_lives() -> None:
    story = Story()
    story.look()
    story.runs()
    zombie = story.child
    story.ends(16)
    story.children = [replace(zombie, deleting=True)]  # attempt 2 was recorded; the runner died before creating it
    assert story.look(after=60).create is None
    story.children = []
    decision = story.look()
    assert decision.create is not None
    assert decision.create.attempt == 2


def test_a_name_that_somebody_else_took_is_never_adopted() -> None:
    story = Story()
    story.look()
    story.children = [child(1, ours=False)]
    decision = story.look(after=10)
    assert (decision.create, decision.delete) == (None, ())
    assert story.says(ConditionType.DEGRADED) == ("True", "NameTaken")
    assert story.says(ConditionType.PROGRESSING) == ("False", "Blocked")
    story.children = []
    story.look(after=1000)
    assert story.numbers == [1, 1]


def test_a_number_that_a_child_carries_is_never_given_again() -> None:
    """The status was restored from a backup; attempt 7 still runs."""
    story = Story()
    story.children = [child(7)]
    decision = story.look()
    assert decision.create is None
    assert decision.delete == ("other-7",)
    story.look()
    assert story.attempt.attempt == 8


def test_a_child_that_is_being_deleted_is_waited_for() -> None:
    story = Story()
    story.look()
    story.runs()
    story.put(replace(story.child, deleting=True))
    decision = story.look()
    assert (decision.create, decision.delete) == (None, ())
    story.vanishes()
    assert story.numbers == [1, 2]


def test_only_the_newest_finished_children_are_kept() -> None:
    story = Story(job_spec(restart={"maxDisruptions": 100}))
    story.look()
    for _ in range(3 * KEPT_CHILDREN):
        story.runs()
        story.ends(None, disrupted=True)
    story.look()
    finished = [one.attempt for one in story.children if one.state is not ChildState.ACTIVE]
    assert sorted(finished) == list(range(2 * KEPT_CHILDREN + 1, 3 * KEPT_CHILDREN + 1))


# The end is sticky


def finished_story() -> Story:
    story = Story()
    story.passes("single", "ddp", "fsdp", "zero3")
    return story


def test_the_outcome_wins_over_children_that_are_gone() -> None:
    story = finished_story()
    story.children = []  # a time to live removed them
    for _ in range(5):
        decision = story.look(after=1000)
        assert (decision.create, decision.events) == (None, ())
    assert story.status.phase is Phase.SUCCEEDED
    assert story.numbers == [1, 2, 3, 4]


def test_a_child_that_appears_after_the_end_is_removed() -> None:
    story = Story()
    story.look()
    story.runs()
    story.ends(11)
    story.children.append(child(1))
    story.put(child(1))
    assert story.look().delete == ("other-1",)
    assert story.status.phase is Phase.FAILED


def test_a_job_that_is_being_deleted_starts_nothing() -> None:
    story = Story()
    story.look()
    story.runs()
    gone = replace(story.observed(), deleting=True)
    decision = decide(gone, now=story.now)
    assert (decision.create, decision.delete) == (None, ("uid-1",))
    assert decision.status == story.status


# Specs that cannot be run


def test_an_invalid_spec_starts_nothing_and_names_every_problem() -> None:
    story = Story(job_spec(training={"steps": -1, "globalBatchSize": 0}))
    story.look()
    assert story.attempts == []
    assert story.says(ConditionType.ACCEPTED) == ("False", "InvalidSpec")
    message = story.condition(ConditionType.ACCEPTED).message
    assert "spec.training.steps is -1" in message
    assert "spec.training.globalBatchSize is 0" in message
    assert len(story.status.conditions) == len(ConditionType)
    writes = story.writes
    story.look()
    assert story.writes == writes
    assert [event.reason for event in story.events] == ["InvalidSpec"], "told once"
    story.edit(training={"steps": 120, "globalBatchSize": 16})
    story.look()
    assert story.numbers == [1]
    assert story.says(ConditionType.ACCEPTED) == ("True", "SpecAccepted")


def test_a_spec_that_became_invalid_leaves_the_running_attempt_alone() -> None:
    story = Story()
    story.look()
    story.runs()
    story.edit(ladder=[{"name": "other", "strategy": "ddp"}])
    decision = story.look()
    assert (decision.create, decision.delete, decision.control) == (None, (), None)
    assert story.says(ConditionType.ACCEPTED) == ("False", "InvalidSpec")
    assert story.status.current is not None


def test_a_status_from_the_api_server_is_the_whole_memory() -> None:
    story = Story()
    story.passes("single")
    document = story.status.to_document()
    assert Status.from_document(document) == story.status
    assert len(str(document)) < 32_000
