"""How did this pod end, and why? Pure: marks, torchrun's record and our own doing in, exit code and first cause out."""

import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ctj_api.exit_codes import ENDED_WELL, ExitCode, reason_of
from ctj_api.report import Failure
from ctj_trainer.marks import MAX_LAST_LINES, MAX_MESSAGE, Mark, ended_well, root_cause
from ctj_trainer.supervisor.watch import End

# NCCL's watchdog and gloo abort the process of a rank whose peer is gone.
_PEER_LOST_SIGNS = ("Watchdog caught collective operation timeout", "ProcessGroupNCCL", "Connection closed by peer")

# Exit codes by which a rank, or the agent for it, tells its kind where no file could be left (a full disk).
_TELLING = set(ExitCode) - {*ENDED_WELL, ExitCode.KILLED}
# What a rank without a mark may have got from the agent or from a lost peer.
_ENDED_BY_OTHERS = {-signal.SIGTERM, -signal.SIGKILL, -signal.SIGABRT, ExitCode.PEER_LOST}


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """How torchrun saw a failed worker end; negative exit codes are signals."""

    rank: int
    exit_code: int
    at: float


@dataclass(frozen=True, kw_only=True)
class AgentRecord:
    """What torchrun's agent said, and its own exit code."""

    exit_code: int
    failures: tuple[RankExit, ...] = ()
    rendezvous: str | None = None


@dataclass(frozen=True, kw_only=True)
class PodOutcome:
    """Exit code of the pod, and what it failed of."""

    code: ExitCode
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything the judgement rests on. `end` is set where the supervisor ended the workers."""

    marks: Sequence[Mark]
    ranks: int
    agent: AgentRecord
    end: End | None
    oom_kills: int
    last_lines: Callable[[int | None], str]
    agent_log: str = ""


def judge(facts: Facts) -> PodOutcome:
    """Return the pod's exit code and first cause, best evidence first."""
    well = ended_well(facts.marks, ranks=facts.ranks)
    if well is not None:
        return PodOutcome(code=well)
    cause = root_cause(facts.marks)
    if cause is not None and cause.kind is not ExitCode.PEER_LOST:
        return _failed(facts, cause.kind, cause.message, rank=cause.rank, lines=cause.last_lines)
    if facts.end is not None:
        return (
            PodOutcome(code=facts.end.code)
            if facts.end.code in ENDED_WELL
            else _failed(facts, facts.end.code, facts.end.message, lines="")
        )
    return _killed(facts) or _left_silently(facts) or _peer_lost(facts, cause) or _unexplained(facts)


def read_agent_record(path: Path, *, exit_code: int) -> AgentRecord:
    """Read what the agent left; nothing, if it was killed itself."""
    try:
        document = json.loads(path.read_text())
        failures = tuple(
            RankExit(rank=int(f["rank"]), exit_code=int(f["exitCode"]), at=float(f["at"]))
            for f in document.get("failures", [])
        )
        return AgentRecord(exit_code=exit_code, failures=failures, rendezvous=document.get("rendezvous"))
    except (OSError, ValueError, KeyError, TypeError):
        return AgentRecord(exit_code=exit_code)


def _killed(facts: Facts) -> PodOutcome | None:
    """A rank that was killed left no mark; the agent ends the others by SIGTERM, so that -9 is the first cause."""
    marked = {mark.rank for mark in facts.marks}
    victims = [f for f in facts.agent.failures if f.exit_code == -signal.SIGKILL and f.rank not in marked]
    if not victims and facts.agent.exit_code != -signal.SIGKILL:
        return None
    rank = victims[0].rank if victims else None
    who = f"rank {rank}" if victims else "torchrun's agent"
    if facts.oom_kills:
        text = f"{who} was killed by the kernel: the pod's memory limit was reached"
        return _failed(facts, ExitCode.OUT_OF_MEMORY, text, rank=rank, lines="")
    return _failed(facts, ExitCode.KILLED, f"{who} was killed (SIGKILL) by somebody outside", rank=rank, lines="")


def _left_silently(facts: Facts) -> PodOutcome | None:
    """A rank that ended by itself without a mark is the cause, and not the peers that say they lost it."""
    marked = {mark.rank for mark in facts.marks}
    silent = [f for f in facts.agent.failures if f.rank not in marked and f.exit_code not in _ENDED_BY_OTHERS]
    first = min(silent, key=lambda f: f.at, default=None)
    return None if first is None else _without_mark(facts, first)


def _peer_lost(facts: Facts, cause: Mark | None) -> PodOutcome | None:
    if cause is not None:
        return _failed(facts, ExitCode.PEER_LOST, cause.message, rank=cause.rank, lines=cause.last_lines)
    if facts.agent.rendezvous:
        return _failed(
            facts, ExitCode.PEER_LOST, f"the pods did not find each other: {facts.agent.rendezvous}", lines=""
        )
    for failure in facts.agent.failures:
        lines = facts.last_lines(failure.rank)
        if failure.exit_code == -signal.SIGABRT and any(sign in lines for sign in _PEER_LOST_SIGNS):
            text = f"rank {failure.rank} aborted after it lost a peer"
            return _failed(facts, ExitCode.PEER_LOST, text, rank=failure.rank, lines=lines)
    return None


def _unexplained(facts: Facts) -> PodOutcome:
    first = min(facts.agent.failures, key=lambda f: f.at, default=None)
    if first is None:
        silent = "every worker ended without saying how" if facts.agent.exit_code == 0 else "torchrun's agent failed"
        text = f"{silent} (exit code {facts.agent.exit_code})"
        lines = facts.last_lines(None) or facts.agent_log
        return _failed(facts, _told_by(facts.agent.exit_code), text, lines=lines)
    return _without_mark(facts, first)


def _without_mark(facts: Facts, end: RankExit) -> PodOutcome:
    how = f"exit code {end.exit_code}" if end.exit_code >= 0 else signal.Signals(-end.exit_code).name
    text = f"rank {end.rank} ended without saying why ({how})"
    return _failed(facts, _told_by(end.exit_code), text, rank=end.rank, lines="")


def _told_by(exit_code: int) -> ExitCode:
    return ExitCode(exit_code) if exit_code in _TELLING else ExitCode.USER_CODE_OR_IMAGE


def _failed(facts: Facts, code: ExitCode, message: str, *, rank: int | None = None, lines: str) -> PodOutcome:
    return PodOutcome(
        code=code,
        failure=Failure(
            rank=rank,
            reason=reason_of(code),
            message=message[:MAX_MESSAGE],
            last_lines=(lines or facts.last_lines(rank))[-MAX_LAST_LINES:],
        ),
    )
