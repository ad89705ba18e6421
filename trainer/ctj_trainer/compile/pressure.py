"""Is memory nearly full, and would eager need less of it? Pure.

Eager often needs more than compiled: it keeps what a fused kernel never writes. Then a flip turns pressure into a
crash.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ctj_api.attempt import Mode
from ctj_trainer.memory import MemoryUse

THRESHOLD = 0.97  # of the limit; the operator's own background gate has the same
SAMPLES = 3
REST_STEPS = 100  # before eager is thought of again, where it was no remedy


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Most bytes a step needed in each form; None where that form has not been measured."""

    compiled: int | None = None
    eager: int | None = None

    def with_step(self, mode: Mode, peak: int) -> "Peaks":
        """Take over what one more step needed."""
        if mode is Mode.COMPILED:
            return Peaks(compiled=max(peak, self.compiled or 0), eager=self.eager)
        return Peaks(compiled=self.compiled, eager=max(peak, self.eager or 0))

    @property
    def why_not_eager(self) -> str:
        """Why eager would not help; empty where it was seen to need less."""
        if self.compiled is None or self.eager is None:
            return "what eager needs has not been measured"
        if self.eager >= self.compiled:
            return f"eager steps were seen to need {_mib(self.eager)}, compiled ones {_mib(self.compiled)}"
        return ""


class PressureRule:
    """Tells lasting pressure from a moment of it."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def judge(self, memory: MemoryUse | None) -> str:
        """Return what is wrong once the threshold was passed `SAMPLES` times in a row."""
        if memory is None or not memory.limit or memory.used <= THRESHOLD * memory.limit:
            self._in_a_row = 0
            return ""
        self._in_a_row += 1
        if self._in_a_row < SAMPLES:
            return ""
        self._in_a_row = -REST_STEPS
        return f"memory_pressure: {memory.used / memory.limit:.0%} of {_mib(memory.limit)} in use for {SAMPLES} steps"


def highest(peaks: Iterable[Peaks]) -> Peaks:
    """The worst rank's of each form; a form counts only where every rank has measured it."""
    known = list(peaks)
    compiled = [p.compiled for p in known if p.compiled is not None]
    eager = [p.eager for p in known if p.eager is not None]
    return Peaks(
        compiled=max(compiled) if len(compiled) == len(known) else None,
        eager=max(eager) if len(eager) == len(known) else None,
    )


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
