"""The step a person sees: what is trained and kept, also while an attempt has not loaded it yet."""

import pytest
from tests.unit.job_story import Story


def first_stage_ended_at_nine() -> Story:
    """Its attempt came to step 9 and saved step 7; the next one is about to start."""
    story = Story()
    story.look()
    story.runs(step=9, checkpoint_step=7)
    story.ends(137)
    return story


def test_an_attempt_that_waits_for_its_pods_stands_where_it_will_go_on_from() -> None:
    story = first_stage_ended_at_nine()
    assert (story.attempt.attempt, story.status.step) == (2, 7)


@pytest.mark.parametrize("phase", ["Starting", "Loading", "Compiling"])
def test_a_resumed_attempt_that_still_loads_stands_at_its_checkpoint(phase: str) -> None:
    story = first_stage_ended_at_nine()
    story.runs(step=0, phase=phase, loss=None)
    assert story.status.step == 7
    assert story.status.progress_percentage == 100 * 7 // 120
    story.runs(step=8)
    assert story.status.step == 8


def test_an_attempt_that_ends_before_it_has_loaded_sets_nothing_back() -> None:
    story = first_stage_ended_at_nine()
    story.runs(step=0, phase="Loading", loss=None)
    story.ends(16)
    assert story.status.step == 7


def test_the_next_stage_stands_at_the_step_whose_successors_it_repeats() -> None:
    story = Story()
    story.passes("single")
    story.runs(step=0, phase="Loading", loss=None)
    assert (story.attempt.floor_step, story.status.step) == (15, 15)


def test_a_stage_that_was_gone_back_to_stands_at_its_good_checkpoint() -> None:
    story = Story()
    story.passes("single")
    story.runs(step=33, checkpoint_step=30)
    story.annotations["training.ctj.dev/rollback"] = "1"
    story.look()
    story.ends(143, saved=33)
    story.runs(step=0, phase="Loading", loss=None)
    assert (story.attempt.stage.name, story.status.step) == ("single", 20)
