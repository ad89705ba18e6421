"""Which steps each stage trains, what it starts from and repeats."""

import pytest
from tests.unit.job_story import Story, job_spec, short_spec

from ctj_api.attempt import LineageEntry
from ctj_api.spec import Spec
from ctj_operator.core import ladder


def windows(**changes: object) -> list[tuple[int, int, int]]:
    plan = ladder.plan(Spec.from_document(job_spec(**changes)))
    return [(window.start, window.end, window.replay) for window in plan]


def test_each_stage_starts_k_steps_before_the_end_of_the_one_before() -> None:
    assert windows() == [(0, 20, 5), (15, 40, 5), (35, 60, 5), (55, 120, 0)]


@pytest.mark.parametrize(
    ("steps", "asked", "replay"),
    [(20, None, 5), (100, None, 5), (8, None, 2), (3, None, 0), (20, 0, 0), (20, 19, 19), (20, 50, 19), (1, 5, 0)],
)
def test_a_stage_is_repeated_by_a_quarter_but_at_most_five_steps_unless_asked(
    steps: int, asked: int | None, replay: int
) -> None:
    first = {"name": "single", "strategy": "single", "steps": steps}
    if asked is not None:
        first["replaySteps"] = asked
    plan = ladder.plan(Spec.from_document(job_spec(ladder=[first, {"name": "ddp", "strategy": "ddp"}])))
    assert plan[0].replay == replay
    assert plan[1].start == steps - replay


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"training": {"steps": 60}}, "take 60 steps of spec.training.steps = 60"),
        ({"training": {"globalBatchSize": 15}}, "2 processes, which do not divide spec.training.globalBatchSize = 15"),
        ({"ladder": [{"name": "a", "strategy": "single"}, {"name": "b", "strategy": "ddp"}]}, "spec.ladder[0].steps"),
        (
            {"ladder": [{"name": "a", "strategy": "single", "steps": 2}, {"name": "a", "strategy": "ddp"}]},
            "two stages have the same name",
        ),
    ],
)
def test_a_ladder_that_cannot_be_run_is_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ladder.SpecProblem, match="spec") as refusal:
        windows(**changes)
    assert problem in str(refusal.value)


def test_the_first_stage_starts_fresh_and_saves_where_the_next_one_starts() -> None:
    story = Story()
    story.look()
    attempt = story.attempt
    assert (attempt.window.start_step, attempt.window.end_step, attempt.window.save_at) == (0, 20, (15, 20))
    assert (attempt.floor_step, attempt.lineage, attempt.replay) == (0, [], None)


def test_the_next_stage_repeats_the_last_steps_from_the_earlier_checkpoint() -> None:
    story = Story()
    story.passes("single")
    attempt = story.attempt
    assert attempt.stage.name == "ddp"
    assert attempt.window.start_step == attempt.floor_step == 15
    assert attempt.lineage == [LineageEntry(attempt=1, max_step=15)]
    assert attempt.replay is not None
    assert (attempt.replay.attempt, attempt.replay.from_step, attempt.replay.to_step) == (1, 15, 20)


def test_the_last_stage_runs_to_the_end_and_saves_only_there() -> None:
    story = Story()
    story.passes("single", "ddp", "fsdp")
    assert (story.attempt.window.end_step, story.attempt.window.save_at) == (120, (120,))


def test_a_restart_may_use_checkpoints_of_earlier_attempts_of_the_stage_and_of_its_start() -> None:
    story = Story()
    story.passes("single")
    story.runs()
    story.ends(16, saved=25)
    assert story.attempt.lineage == [LineageEntry(attempt=1, max_step=15), LineageEntry(attempt=2, max_step=40)]
    assert story.attempt.floor_step == 15, "a corrupt newest checkpoint must not stop it from using an older one"


def test_a_stage_that_took_two_attempts_hands_both_on() -> None:
    """The checkpoint K steps before the end may be the first attempt's: it crashed after saving it."""
    story = Story()
    story.look()
    story.runs()
    story.ends(16, saved=15)
    story.runs()
    story.finishes()
    assert story.attempt.lineage == [LineageEntry(attempt=1, max_step=15), LineageEntry(attempt=2, max_step=15)]


def test_the_lineage_is_bounded_and_keeps_the_newest_known_checkpoint() -> None:
    story = Story(short_spec(restart={"maxDisruptions": 1000}))
    story.passes("single")
    story.runs()
    story.ends(16, saved=22)
    for _ in range(70):
        story.runs()
        story.ends(None, disrupted=True)
    kept = [entry.attempt for entry in story.attempt.lineage]
    assert len(kept) == ladder.MAX_LINEAGE
    assert {1, 2} <= set(kept), "the stage's start and its only checkpoint"
    assert kept == sorted(kept)


def test_retention_is_told_to_keep_the_stage_start_and_the_last_good_stage() -> None:
    story = Story()
    story.passes("single", "ddp")
    assert story.attempt.pinned == [LineageEntry(attempt=2, max_step=35), LineageEntry(attempt=2, max_step=40)]


@pytest.mark.parametrize(("stage", "above"), [("single", "fsdp"), ("ddp", "fsdp"), ("fsdp", None), ("zero3", None)])
def test_only_a_stage_that_splits_parameters_over_more_processes_needs_less_memory(stage: str, above: str) -> None:
    found = ladder.more_sharded(Spec.from_document(job_spec()), stage)
    assert (found.name if found else None) == above
