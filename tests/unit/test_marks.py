"""How a pod ended, told from what its ranks left behind."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctj_api.exit_codes import ExitCode
from ctj_trainer.marks import (
    MAX_LAST_LINES,
    Mark,
    clear_marks,
    ended_well,
    read_marks,
    request_stop,
    root_cause,
    stop_requested,
    write_mark,
)

any_mark = st.builds(Mark, rank=st.integers(0, 7), kind=st.sampled_from(ExitCode), at=st.floats(0, 1e9))


def mark(rank: int, kind: ExitCode, at: float = 0.0) -> Mark:
    return Mark(rank=rank, kind=kind, at=at)


def test_a_mark_survives_the_way_to_disk(tmp_path: Path) -> None:
    left = write_mark(tmp_path, rank=3, kind=ExitCode.OUT_OF_MEMORY, message="no room", last_lines="a\nb")
    assert read_marks(tmp_path) == [left]
    assert left.at > 0


def test_the_first_mark_of_a_rank_stays(tmp_path: Path) -> None:
    first = write_mark(tmp_path, rank=0, kind=ExitCode.NON_FINITE, message="loss is nan")
    second = write_mark(tmp_path, rank=0, kind=ExitCode.PEER_LOST, message="Connection closed by peer")
    assert second == first
    assert read_marks(tmp_path) == [first]


def test_a_mark_leaves_no_drafts_and_keeps_only_the_end_of_long_output(tmp_path: Path) -> None:
    left = write_mark(tmp_path, rank=0, kind=ExitCode.USER_CODE, last_lines="x" * 5000 + "end")
    assert left.last_lines.endswith("end")
    assert len(left.last_lines) == MAX_LAST_LINES
    assert [path.name for path in tmp_path.iterdir()] == ["mark-0.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"kind": "NO_SUCH", "rank": 0, "at": 0})])
def test_an_unreadable_mark_is_left_out(tmp_path: Path, text: str) -> None:
    (tmp_path / "mark-0.json").write_text(text)
    assert read_marks(tmp_path) == []


def test_a_disk_that_takes_no_mark_does_not_change_how_a_rank_ends(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    mark = write_mark(gone, rank=0, kind=ExitCode.DATA_OR_STORAGE, message="No space left on device")
    assert mark.kind is ExitCode.DATA_OR_STORAGE
    assert read_marks(gone) == []


def test_an_earlier_life_of_the_folder_is_forgotten(tmp_path: Path) -> None:
    write_mark(tmp_path, rank=0, kind=ExitCode.DONE)
    request_stop(tmp_path, "SIGTERM")
    clear_marks(tmp_path)
    assert read_marks(tmp_path) == []
    assert stop_requested(tmp_path) is None


def test_a_stop_is_seen_with_its_reason(tmp_path: Path) -> None:
    assert stop_requested(tmp_path) is None
    request_stop(tmp_path, "suspended")
    assert stop_requested(tmp_path) == "suspended"


def test_the_earliest_failure_is_the_cause() -> None:
    marks = [mark(0, ExitCode.USER_CODE, 5.0), mark(1, ExitCode.DATA_OR_STORAGE, 4.0)]
    assert root_cause(marks) == marks[1]


def test_a_lost_peer_is_not_the_cause_even_if_it_spoke_first() -> None:
    marks = [mark(0, ExitCode.PEER_LOST, 1.0), mark(1, ExitCode.OUT_OF_MEMORY, 2.0)]
    assert root_cause(marks) == marks[1]


@given(st.lists(any_mark))
def test_a_lost_peer_is_the_cause_only_where_nothing_else_failed(marks: list[Mark]) -> None:
    cause = root_cause(marks)
    failures = {m.kind for m in marks} - {ExitCode.DONE, ExitCode.STOPPED}
    assert (cause is None) == (not failures)
    if cause is not None:
        assert (cause.kind is ExitCode.PEER_LOST) == (failures == {ExitCode.PEER_LOST})


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([ExitCode.DONE, ExitCode.DONE], ExitCode.DONE),
        ([ExitCode.DONE], None),  # one rank is silent
        ([ExitCode.STOPPED], None),  # the other was killed, and the agent asked this one to end
        ([ExitCode.STOPPED, ExitCode.STOPPED], ExitCode.STOPPED),
        ([ExitCode.STOPPED, ExitCode.PEER_LOST], ExitCode.STOPPED),
        ([ExitCode.STOPPED, ExitCode.NON_FINITE], None),
        ([ExitCode.DONE, ExitCode.PEER_LOST], None),
        ([], None),
    ],
)
def test_a_good_end_takes_every_rank(kinds: list[ExitCode], expected: ExitCode | None) -> None:
    assert ended_well([mark(rank, kind) for rank, kind in enumerate(kinds)], ranks=2) is expected
