"""Is the pod hung, or does it take too long to stop? Pure: facts and a clock reading in, a decision out.

Hung means silent (the process is stopped or gone astray in C) or busy without moving on (a collective that nobody else
joined). A compilation may be long and is measured against its own limit, also on the ranks that wait for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ctj_api.exit_codes import ExitCode
from ctj_api.report import Progress
from ctj_trainer import progress as phases

SLOW_PHASE_SECONDS = 1800.0
"""Start, load, save, export: bound by data and storage, not by us."""
LINGER_SECONDS = 30.0
"""From the last word of the ranks to the end of their processes; torchrun itself would wait 300 s for other pods."""
MARGIN_SECONDS = 15.0
"""Kept of the grace period for killing, reporting and leaving."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Longest time without a change, in seconds."""

    heartbeat: float
    step: float
    compile: float
    slow: float = SLOW_PHASE_SECONDS


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A wish for a checkpoint and an end. `hard`: somebody will kill us, so a save is cut too."""

    at: float
    seconds: float
    reason: str
    hard: bool


@dataclass(frozen=True, kw_only=True)
class End:
    """The supervisor must end the workers itself."""

    code: ExitCode
    message: str
    hung: bool = False


def stop_seconds(grace: float) -> float:
    """How long workers may take once a kill is announced: what remains of the grace period after our own margin."""
    return max(grace - MARGIN_SECONDS, grace / 2)


class Watch:
    """Remembers when what last moved."""

    def __init__(self, limits: Patience, *, now: float) -> None:
        self._limits = limits
        self._progress: Progress | None = None
        self._moved_at = now
        self._heard_at = now
        self._settled_at: float | None = None
        self._kept_step: int | None = None

    def look(
        self,
        *,
        now: float,
        progress: Progress | None,
        compiling: Mapping[str, float],
        settled: bool,
        stop: Stop | None,
    ) -> End | None:
        """Decide. `compiling`: ranks of any pod that say so, and for how many seconds. `settled`: the ranks' marks
        already tell how it ended."""
        self._note(now, progress)
        if settled:
            self._settled_at = self._settled_at or now
            late = now - self._settled_at >= LINGER_SECONDS
            return End(code=ExitCode.HANG, message="the workers did not end after their last word") if late else None
        if stop is not None:
            return self._stopping(now, stop, compiling)
        return self._hung(now, compiling)

    @property
    def nothing_to_lose(self) -> bool:
        """No step was made since the newest checkpoint: ending now costs no work."""
        before_steps = self._progress is None or self._progress.phase in (phases.STARTING, phases.LOADING)
        return before_steps or (self._progress is not None and self._progress.step == self._kept_step)

    def _note(self, now: float, progress: Progress | None) -> None:
        if progress is None:
            return
        before = self._progress
        if before is None or _position(before) != _position(progress):
            self._moved_at = now
        if before is None or before.updated_at != progress.updated_at:
            self._heard_at = now
        if self._kept_step is None and progress.phase not in (phases.STARTING, phases.LOADING):
            self._kept_step = progress.step
        if progress.checkpoint_step is not None:
            self._kept_step = max(self._kept_step or 0, progress.checkpoint_step)
        self._progress = progress

    def _stopping(self, now: float, stop: Stop, compiling: Mapping[str, float]) -> End | None:
        phase = self._phase(compiling)
        busy_before_steps = phase in (phases.STARTING, phases.LOADING, phases.COMPILING, phases.PROBING)
        if busy_before_steps and self.nothing_to_lose:
            # A first compilation may outlive any grace period, and its end would only be thrown away.
            return End(code=ExitCode.STOPPED, message=f"stopped in phase {phase}: no new step to save")
        if now - stop.at < stop.seconds or (phase == phases.SAVING and not stop.hard):
            return None if stop.hard else self._hung(now, compiling)
        return End(
            code=ExitCode.KILLED,
            message=f"no checkpoint within {stop.seconds:.0f} s of the stop ({stop.reason}), in phase {phase}; the "
            "steps since the newest checkpoint will be repeated. Give the pod a longer terminationGracePeriodSeconds",
        )

    def _hung(self, now: float, compiling: Mapping[str, float]) -> End | None:
        silent = now - self._heard_at
        if self._progress is not None and silent >= self._limits.heartbeat:
            return End(
                code=ExitCode.HANG,
                message=f"no sign of life from local rank 0 for {silent:.0f} s: stopped, out of CPU, or without space "
                "in the run folder",
                hung=True,
            )
        limit, still = self._limit(compiling), now - self._moved_at
        if still < limit:
            return None
        step = self._progress.step if self._progress else 0
        return End(
            code=ExitCode.HANG,
            message=f"nothing moved for {still:.0f} s in phase {self._phase(compiling)} after step {step} (limit "
            f"{limit:.0f} s){_named(compiling)}",
            hung=True,
        )

    def _limit(self, compiling: Mapping[str, float]) -> float:
        if self._phase(compiling) in (phases.COMPILING, phases.PROBING):
            return self._limits.compile
        if self._phase(compiling) != phases.TRAINING or self._progress is None:
            return self._limits.slow
        return max(self._limits.step, 10 * (self._progress.step_seconds or 0.0))

    def _phase(self, compiling: Mapping[str, float]) -> str:
        if self._progress is None:
            return phases.STARTING
        return phases.COMPILING if compiling else self._progress.phase


def _named(compiling: Mapping[str, float]) -> str:
    who = ", ".join(f"rank {rank} for {seconds:.0f} s" for rank, seconds in sorted(compiling.items()))
    return f"; compiling: {who}".replace("rank elsewhere", "a rank of another pod") if who else ""


def _position(progress: Progress) -> tuple[object, ...]:
    return progress.phase, progress.step, progress.graphs, progress.checkpoint_step
