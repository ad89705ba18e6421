"""Which exit code and cause follow from marks, torchrun's record and the supervisor's own doing."""

from typing import Any

import pytest

from ctj_api.exit_codes import ExitCode
from ctj_trainer.marks import Mark
from ctj_trainer.supervisor.outcome import AgentRecord, Facts, PodOutcome, RankExit, judge
from ctj_trainer.supervisor.watch import End


def outcome(
    marks: list[Mark] | None = None,
    *,
    exits: dict[int, int] | None = None,
    agent_exit: int = 1,
    lines: str = "",
    **facts: Any,
) -> PodOutcome:
    failures = tuple(RankExit(rank=rank, exit_code=code, at=0.0) for rank, code in (exits or {}).items())
    record = AgentRecord(exit_code=agent_exit, failures=failures, rendezvous=facts.pop("rendezvous", None))
    defaults: dict[str, Any] = {"end": None, "oom_kills": 0, "last_lines": lambda _: lines}
    return judge(Facts(marks=marks or [], ranks=2, agent=record, **(defaults | facts)))


def mark(rank: int, kind: ExitCode, message: str = "", at: float = 0.0) -> Mark:
    return Mark(rank=rank, kind=kind, message=message, at=at)


@pytest.mark.parametrize("kind", [ExitCode.DONE, ExitCode.STOPPED])
def test_a_good_end_has_no_failure(kind: ExitCode) -> None:
    assert outcome([mark(0, kind), mark(1, kind)], agent_exit=0) == PodOutcome(code=kind)


def test_the_first_failed_rank_is_named_with_its_last_lines() -> None:
    ended = outcome(
        [mark(0, ExitCode.PEER_LOST, at=1.0), mark(1, ExitCode.DATA_OR_STORAGE, "disk full", at=2.0)], lines="x"
    )
    assert ended.code is ExitCode.DATA_OR_STORAGE
    assert ended.failure is not None
    assert (ended.failure.rank, ended.failure.reason) == (1, "DataOrStorage")
    assert (ended.failure.message, ended.failure.last_lines) == ("disk full", "x")


def test_a_killed_rank_is_the_cause_beside_a_lost_peer() -> None:
    ended = outcome([mark(0, ExitCode.PEER_LOST)], exits={0: 15, 1: -9})
    assert ended.code is ExitCode.KILLED
    assert ended.failure is not None
    assert ended.failure.rank == 1


@pytest.mark.parametrize(
    ("exit_code", "kind", "says"),
    [
        (3, ExitCode.USER_CODE_OR_IMAGE, "exit code 3"),
        (-11, ExitCode.USER_CODE_OR_IMAGE, "SIGSEGV"),
        (12, ExitCode.DATA_OR_STORAGE, "exit code 12"),  # a full disk takes no mark
    ],
)
def test_a_rank_that_left_silently_is_the_cause_beside_those_that_lost_it(
    exit_code: int, kind: ExitCode, says: str
) -> None:
    ended = outcome([mark(0, ExitCode.PEER_LOST, "Connection closed by peer")], exits={0: 15, 1: exit_code})
    assert ended.code is kind, "a lost peer would be tried again and again"
    assert ended.failure is not None
    assert ended.failure.rank == 1
    assert says in ended.failure.message


def test_on_a_full_disk_the_agents_exit_code_tells_the_kind() -> None:
    assert outcome(agent_exit=12).code is ExitCode.DATA_OR_STORAGE
    assert outcome(agent_exit=3).code is ExitCode.USER_CODE_OR_IMAGE


@pytest.mark.parametrize("exit_code", [-15, -6, 15])
def test_a_rank_ended_by_others_is_not_the_cause(exit_code: int) -> None:
    assert outcome([mark(0, ExitCode.PEER_LOST)], exits={1: exit_code}).code is ExitCode.PEER_LOST


def test_a_rank_killed_while_the_other_obeys_a_stop_is_not_a_stop() -> None:
    assert outcome([mark(0, ExitCode.STOPPED)], exits={0: 143, 1: -9}).code is ExitCode.KILLED


def test_a_kill_for_memory_is_out_of_memory() -> None:
    assert outcome(exits={1: -9}, oom_kills=1).code is ExitCode.OUT_OF_MEMORY


def test_a_killed_agent_is_a_kill() -> None:
    assert outcome(agent_exit=-9).code is ExitCode.KILLED


def test_pods_that_never_met_try_again() -> None:
    ended = outcome(rendezvous="DistNetworkError: timed out")
    assert ended.code is ExitCode.PEER_LOST
    assert ended.failure is not None
    assert "timed out" in ended.failure.message


def test_an_abort_by_the_collective_watchdog_is_a_lost_peer() -> None:
    assert (
        outcome(exits={0: -6}, lines="[rank0]: Watchdog caught collective operation timeout").code is ExitCode.PEER_LOST
    )
    assert outcome(exits={0: -6}, lines="terminate called").code is ExitCode.USER_CODE_OR_IMAGE


@pytest.mark.parametrize(
    ("exits", "agent_exit", "says"),
    [({1: -11}, 1, "SIGSEGV"), ({1: 3}, 1, "exit code 3"), ({}, 0, "without saying how"), ({}, 1, "agent failed")],
)
def test_what_nobody_explains_is_user_code_or_image(exits: dict[int, int], agent_exit: int, says: str) -> None:
    ended = outcome(exits=exits, agent_exit=agent_exit, agent_log="ImportError: libfoo", lines="")
    assert ended.code is ExitCode.USER_CODE_OR_IMAGE
    assert ended.failure is not None
    assert says in ended.failure.message
    if not exits:
        assert "libfoo" in ended.failure.last_lines


def test_our_own_kill_is_told_as_its_reason() -> None:
    end = End(code=ExitCode.HANG, message="nothing moved", hung=True)
    assert outcome(exits={0: -9, 1: -9}, end=end).code is ExitCode.HANG


def test_a_failure_before_our_own_kill_stays_the_cause() -> None:
    end = End(code=ExitCode.HANG, message="did not end after their last word")
    assert outcome([mark(1, ExitCode.NON_FINITE, "loss is nan")], exits={0: -9}, end=end).code is ExitCode.NON_FINITE


def test_a_stop_with_nothing_to_save_is_no_failure() -> None:
    end = End(code=ExitCode.STOPPED, message="no new step to save")
    assert outcome(exits={0: -9, 1: -9}, end=end) == PodOutcome(code=ExitCode.STOPPED)
