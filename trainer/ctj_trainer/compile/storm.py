"""Will the compiler ever settle? Tells a recompile storm from a warm-up and from a finite set of shapes. Pure.

A guard on a value that changes (an attribute, a flag) gains nothing from one more graph. A guard on a size may: eight
lengths in random order need eight graphs and no more, so sizes are left to the recompile limit, which is the budget of
the person who wrote the job, unless far more graphs than torch's own limit come within one window.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ctj_trainer.compile.causes import Diagnosis, Event, EventKind, FaultClass, Place, diagnose

WINDOW_STEPS = 20
VALUES_TOLERATED = 2  # the third recompilation for another value is a storm
SHAPES_TOLERATED = 8  # torch's default recompile limit: that many lengths are a set, not a storm


@dataclass(frozen=True, kw_only=True)
class Storm:
    """Recompilations of one function that will not end by themselves."""

    place: Place | None
    diagnosis: Diagnosis
    count: int

    def __str__(self) -> str:
        return f"recompile_storm: {self.count} in {WINDOW_STEPS} steps: {self.diagnosis}"


class StormRule:
    """Judges recompilations step by step, function by function."""

    def __init__(self, *, declared_shapes: int = 0) -> None:
        self._shapes_tolerated = max(SHAPES_TOLERATED, declared_shapes)
        self._recent: dict[tuple[Place | None, bool], deque[int]] = {}  # (function, about a size) -> step of each

    def judge(
        self, step: int, events: Sequence[Event], *, is_warming: bool, instances: Callable[[Place | None], int]
    ) -> Storm | None:
        """Return the storm that shows in the `events` of this step, if one does.

        `instances(place)`: how many modules run that function. While the first steps run, each of them may bring a
        constant of its own (a layer number): one graph for each is no storm yet.
        """
        for event in events:
            if event.kind is not EventKind.RECOMPILE:
                continue
            diagnosis = diagnose(event)
            is_shape = diagnosis.fault is FaultClass.SHAPE
            recent = self._recent.setdefault((event.place, is_shape), deque())
            recent.append(step)
            while recent[0] <= step - WINDOW_STEPS:
                recent.popleft()
            tolerated = self._shapes_tolerated if is_shape else VALUES_TOLERATED
            if is_warming and not is_shape:
                tolerated += instances(event.place) - 1
            if len(recent) > tolerated:
                return Storm(place=event.place, diagnosis=diagnosis, count=len(recent))
        return None
