"""What should a person know although nothing is given up? Each said once, by whoever asks for the new ones."""

from collections.abc import Sequence

from ctj_trainer.compile.causes import Event, diagnose
from ctj_trainer.compile.in_place import CompiledRegions
from ctj_trainer.compile.watch import CompileFacts

BUDGET_SECONDS = 600.0
_MOST_BREAKS = 3  # places named; a report has room for eight notices


class Notices:
    """Collects them."""

    def __init__(self) -> None:
        self._new: list[str] = []
        self._told: set[str] = set()

    def add(self, text: str, *, once: str = "") -> None:
        """Say it unless it was said, or is empty; of several texts about one thing (`once`) only the first."""
        key = once or text
        if text and key not in self._told:
            self._told.add(key)
            self._new.append(text)

    def about_breaks(self, breaks: Sequence[Event], regions: CompiledRegions) -> None:
        """Say where graphs break, and how often in each micro batch: once in every region that runs this line."""
        for event in breaks[:_MOST_BREAKS]:
            times = regions.instances(event.place)
            more = f"; {len(breaks) - _MOST_BREAKS} more places" if len(breaks) > _MOST_BREAKS else ""
            self.add(f"graph break, {times} in each micro batch: {diagnose(event)}{more}")

    def about_seconds(self, facts: CompileFacts) -> None:
        """Say when more was spent on compiling than a job should need."""
        if facts.compile_seconds > BUDGET_SECONDS:
            self.add(
                f"compiling took {facts.compile_seconds:.0f} s so far, for {facts.graphs} graphs and "
                f"{facts.recompiles} recompilations; regional scope and a warm compile cache cost less",
                once="compile seconds",
            )

    def take(self) -> list[str]:
        """Return what is new since the last call."""
        new, self._new = self._new, []
        return new
