"""How do the regions of this stage run, step by step? Holds the verdict and the one place where it changes."""

import logging
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ctj_api.attempt import Attempt, Mode
from ctj_api.report import CompileVerdict
from ctj_api.spec import CompileScope
from ctj_api.tolerances import limits_for
from ctj_trainer.compile.guard import CompileGuard
from ctj_trainer.compile.probe import Pass, probe
from ctj_trainer.compile.timing import WARM_STEPS, StepTime, measure_speed, plan_timing
from ctj_trainer.compile.verdict import Cause, Decision, give_up, judge_probe, judge_speed, store
from ctj_trainer.compile.watch import CompileFacts, StormRule, one_line
from ctj_trainer.ranks import Ranks
from ctj_trainer.records import StepRecord
from ctj_trainer.strategies.prepared import Prepared

log = logging.getLogger("ctj")
_COMPILER_FOLDERS = ("/torch/_dynamo/", "/torch/_inductor/", "/torch/_functorch/")


def why_not_compiled(attempt: Attempt, decision: Decision | None) -> str:
    """Return why nothing is compiled in this attempt; empty if it is."""
    if attempt.compile.scope is CompileScope.DISABLED:
        return "spec.compile.scope is disabled"
    if attempt.mode is Mode.EAGER:
        return "this attempt was asked to run eager"
    if decision is not None and decision.is_eager_throughout:
        return decision.verdict.reason
    return ""


class CompileSession:
    """Compiled, or eager for a reason; every rank holds an equal one. `guard` None: nothing was compiled."""

    def __init__(
        self, attempt: Attempt, *, decision: Decision | None, guard: CompileGuard | None, folder: Path, ranks: Ranks
    ) -> None:
        self._attempt = attempt
        self._guard = guard
        self._folder = folder
        self._ranks = ranks
        self._plan = plan_timing(attempt)
        self._storm = StormRule()
        self._times: dict[int, StepTime] = {}
        self._steps_here = 0
        self._recompiles_at_warm = 0
        self.facts = CompileFacts()
        self.decision = decision
        if guard is None and decision is None:
            reason = why_not_compiled(attempt, None)
            self.decision = give_up(None, cause=Cause.CONTROL, reason=reason)

    @property
    def verdict(self) -> CompileVerdict | None:
        """The verdict so far, for the report."""
        return self.decision.verdict if self.decision else None

    @property
    def gave_up(self) -> bool:
        """Whether every step from here on is eager, for another reason than speed."""
        return self.decision is not None and self.decision.is_eager_throughout

    @property
    def is_compiled(self) -> bool:
        """Whether regions are compiled in this process at all."""
        return self._guard is not None

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """Run a forward eager, between micro batches."""
        if self._guard is None:
            yield
            return
        before = self._guard.mode
        self._guard.run(Mode.EAGER)
        try:
            yield
        finally:
            self._guard.run(before)

    @property
    def needs_probe(self) -> bool:
        """Whether compiled code waits to be compared with eager."""
        return self._guard is not None and self.decision is None

    @property
    def recompiles_after_warmup(self) -> int:
        """Recompilations after this process's first steps."""
        return self.facts.recompiles - self._recompiles_at_warm if self._steps_here >= WARM_STEPS else 0

    def remember(self, records: Iterable[StepRecord]) -> None:
        """Take over the timed steps of an interrupted attempt of the same stage."""
        for r in records:
            self._note(StepTime(step=r.step, mode=r.mode, seconds=r.seconds, compiling=r.compiling))

    def run_probe(self, run: Pass, prepared: Prepared) -> None:
        """Decide whether compiled is correct, and store it. Collective."""
        assert self._guard is not None
        limits = limits_for(self._attempt.compile.tolerances, self._attempt.training.precision)
        result = probe(run, inner=prepared.inner, guard=self._guard, limits=limits, ranks=self._ranks)
        self.facts = self._guard.watch.read()
        self._decide(judge_probe(result, limits))

    def mode_of(self, step: int) -> Mode:
        """How a step runs."""
        if self._guard is None or self.gave_up:
            return Mode.EAGER
        if step <= self._plan.last:
            return self._plan.mode_of(step)
        return self.decision.verdict.mode if self.decision else Mode.COMPILED

    def before_step(self, step: int) -> None:
        """Flip if this step runs otherwise than the last one; here and nowhere else."""
        if self._guard is not None:
            self._guard.run(self.mode_of(step))

    def look(self, step: int) -> str:
        """Read the compiler's counters after a backward; return why compiled code must be given up, or nothing."""
        if self._guard is None:
            return ""
        self.facts = self._guard.watch.read()
        if self._steps_here < WARM_STEPS:
            self._storm.settle(self.facts)
        return "" if self.gave_up else self._storm.judge(step, self.facts)

    def after_step(self, step: int, *, seconds: float, compiling: bool) -> None:
        """Note the duration, and decide once the last timed step is over. Collective at that step."""
        self._steps_here += 1
        if self._steps_here == WARM_STEPS:
            self._recompiles_at_warm = self.facts.recompiles
        if self._guard is None:
            return
        self._note(StepTime(step=step, mode=self.mode_of(step), seconds=seconds, compiling=compiling))
        if step == self._plan.last and self.decision is not None and self.decision.cause is Cause.CORRECT:
            self._conclude()

    def fall_back(self, *, cause: Cause, reason: str) -> None:
        """Eager from the next step on. Every rank calls this after the same step."""
        before = self.decision
        self._decide(give_up(before, cause=cause, reason=reason), keep=cause is not Cause.CONTROL)

    def blame(self, error: Exception) -> str:
        """Return why the next attempt runs eager, if `error` came out of compiled code; else nothing.

        Not collective: one rank may have failed while its peers wait, so this attempt is lost. The verdict is stored
        for the next one. A mistake in the recipe's own code looks the same here, and will show itself there.
        """
        if self._guard is None or self._guard.mode is Mode.EAGER or not _came_through_compiler(error):
            return ""
        reason = one_line(f"compiled code raised {type(error).__name__}: {error}")
        store(give_up(self.decision, cause=Cause.COMPILER, reason=reason), self._folder, stage=self._attempt.stage.name)
        return reason

    def _note(self, time: StepTime) -> None:
        """Keep only what is timed: a stage may have millions of steps."""
        if self._plan.is_timed(time.step):
            self._times[time.step] = time

    def _conclude(self) -> None:
        assert self.decision is not None
        # Clocks differ between ranks, the verdict must not.
        speed = self._ranks.share(measure_speed(self._plan, self._times.values()))
        compile_seconds = self._ranks.share(self.facts.compile_seconds)
        self._decide(judge_speed(self.decision, speed, self._attempt.compile, compile_seconds=compile_seconds))

    def _decide(self, decision: Decision, *, keep: bool = True) -> None:
        if decision == self.decision:
            return
        self.decision = decision
        log.info("compile verdict: %s: %s", decision.verdict.mode, decision.verdict.reason)
        if keep and self._ranks.rank == 0:
            store(decision, self._folder, stage=self._attempt.stage.name)


def _came_through_compiler(error: Exception) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return any(part in frame.filename for frame in frames for part in _COMPILER_FOLDERS)
