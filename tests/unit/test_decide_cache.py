"""Compiled code goes on to the next attempt by its digest: report, status, message. The file itself is never asked."""

from tests.unit.job_story import Story

from ctj_api.attempt import CacheArchive

FIRST = CacheArchive(key="torch-2.15.0-cpu", digest="a" * 64, num_bytes=1000)
SECOND = FIRST.model_copy(update={"digest": "b" * 64})


def test_what_an_attempt_compiled_reaches_the_next_stage() -> None:
    story = Story()
    story.look()
    assert story.attempt.compile_cache is None
    story.runs()
    story.finishes(compile_cache=FIRST)
    assert story.status.compile_cache == FIRST
    assert (story.attempt.stage.name, story.attempt.compile_cache) == ("ddp", FIRST)


def test_an_attempt_that_ends_without_a_word_takes_nothing_away_and_a_newer_archive_replaces_the_older() -> None:
    story = Story()
    story.look()
    story.runs()
    story.finishes(compile_cache=FIRST)
    story.runs()
    story.ends(137)
    assert story.attempt.compile_cache == FIRST
    story.runs()
    story.finishes(compile_cache=SECOND)
    assert story.attempt.compile_cache == SECOND
