"""Which steps of a stage run eager to be timed against compiled ones? A pure function of the step number.

A restart repeats the same pattern, so it repeats the same numbers. Blocks alternate, so that a machine that slows down
slows both sides.
"""

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ctj_api.attempt import Attempt, Mode

WARM_STEPS = 2
_ROUNDS = 2  # compiled, eager, compiled, eager
_LONGEST_BLOCK = 10  # with two rounds: medians of 20 steps each


@dataclass(frozen=True, kw_only=True)
class TimingPlan:
    """Alternating blocks of `block` steps after step `after`, compiled first; `block` 0: the stage is too short."""

    after: int
    block: int

    @property
    def last(self) -> int:
        """Last step of the plan."""
        return self.after + 2 * _ROUNDS * self.block

    def mode_of(self, step: int) -> Mode:
        """How `step` runs: compiled up to the plan and in every other of its blocks."""
        place = step - self.after - 1
        if self.block and place >= 0 and step <= self.last and (place // self.block) % 2:
            return Mode.EAGER
        return Mode.COMPILED

    def is_timed(self, step: int) -> bool:
        """Whether the duration of `step` counts."""
        return self.after < step <= self.last


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Duration of one optimizer step; `compiling` steps are no measure of either side."""

    step: int
    mode: Mode
    seconds: float
    compiling: bool = False


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Medians of both sides."""

    compiled_seconds: float
    eager_seconds: float

    @property
    def speedup(self) -> float:
        """Eager time over compiled time: above 1 compiled is faster."""
        return self.eager_seconds / self.compiled_seconds


SLOW_DOWN = 1.1
_RECENT_STEPS = 20


class SlowDownRule:
    """Notices that compiled steps, once judged, have become slower than eager ones were. Says it once.

    The machine may be slower too, so nothing is flipped: a second timing would change the numbers of a run.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._has_told = False

    def judge(self, time: StepTime, *, eager_seconds: float | None) -> str:
        """Return what is wrong after this step, or nothing."""
        if self._has_told or eager_seconds is None or time.mode is not Mode.COMPILED or time.compiling:
            return ""
        self._recent.append(time.seconds)
        if len(self._recent) < _RECENT_STEPS or statistics.median(self._recent) <= SLOW_DOWN * eager_seconds:
            return ""
        self._has_told = True
        return (
            f"silent_slow_down: the last {_RECENT_STEPS} compiled steps took {statistics.median(self._recent):.3g} s "
            f"(median), eager ones took {eager_seconds:.3g} s; `ctj retry-compile` measures both again"
        )


def plan_timing(attempt: Attempt) -> TimingPlan:
    """Lay the blocks after the replay window and the warm steps, and before the steps the next stage replays.

    Those stay in one mode, so that their record is a clean reference.
    """
    window = attempt.window
    after = max(window.start_step + WARM_STEPS, attempt.replay.to_step if attempt.replay else 0)
    free_until = min((step for step in window.save_at if step > after), default=window.end_step)
    block = min(max(free_until - after, 0) // (2 * _ROUNDS), _LONGEST_BLOCK)
    return TimingPlan(after=after, block=block)


def measure_speed(plan: TimingPlan, times: Iterable[StepTime]) -> Speed | None:
    """Medians over the plan's steps, or None where a side has no sample."""
    timed = [t for t in times if plan.is_timed(t.step) and not t.compiling and t.mode is plan.mode_of(t.step)]
    sides = {mode: [t.seconds for t in timed if t.mode is mode] for mode in Mode}
    if not all(sides.values()):
        return None
    return Speed(
        compiled_seconds=statistics.median(sides[Mode.COMPILED]), eager_seconds=statistics.median(sides[Mode.EAGER])
    )
