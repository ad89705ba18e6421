"""How do the regions of this stage run, step by step? Holds the verdict and the one place where it changes."""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import nn

from ctj_api.attempt import Attempt, CacheArchive, Mode
from ctj_api.report import CompileVerdict
from ctj_api.spec import CompileScope, Fallback
from ctj_api.tolerances import limits_for
from ctj_trainer.compile.blame import blamed
from ctj_trainer.compile.causes import REMEDIES, FaultClass
from ctj_trainer.compile.complaint import Complaint, about_events
from ctj_trainer.compile.guard import CompileGuard
from ctj_trainer.compile.notices import Notices
from ctj_trainer.compile.pressure import Peaks, PressureRule, highest
from ctj_trainer.compile.probe import Pass, probe
from ctj_trainer.compile.storm import StormRule
from ctj_trainer.compile.timing import WARM_STEPS, SlowDownRule, StepTime, measure_speed, plan_timing
from ctj_trainer.compile.verdict import (
    Cause,
    Decision,
    give_up,
    give_up_all,
    give_up_regions,
    judge_probe,
    judge_speed,
    store,
)
from ctj_trainer.compile.watch import CompileFacts
from ctj_trainer.memory import MemoryUse
from ctj_trainer.ranks import Ranks
from ctj_trainer.records import StepRecord
from ctj_trainer.strategies.prepared import Prepared

log = logging.getLogger("ctj")


def why_not_compiled(attempt: Attempt, decision: Decision | None) -> str:
    """Return why nothing is compiled in this attempt; empty if it is."""
    if attempt.compile.scope is CompileScope.DISABLED:
        return "spec.compile.scope is disabled"
    if attempt.mode is Mode.EAGER:
        return "this attempt was asked to run eager"
    if decision is not None and decision.is_eager_throughout:
        return decision.verdict.reason
    return ""


class NoFallbackError(RuntimeError):
    """Compiled code must be given up, and the job asked to fail rather than to go on eager."""


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
        self._storm = StormRule(declared_shapes=len(attempt.compile.shapes or ()))
        self._pressure = PressureRule()
        self._slow_down = SlowDownRule()
        self._peaks = Peaks()
        self._times: dict[int, StepTime] = {}
        self._steps_here = 0
        self._recompiles_at_warm = 0
        self.warm_seconds = 0.0
        self.archive: CacheArchive | None = None
        """Compiled code that the next attempt may start with; known to rank 0."""
        self.facts = CompileFacts()
        self.decision = decision
        self.notices = Notices()
        if guard is None and decision is None:
            reason = why_not_compiled(attempt, None)
            self.decision = give_up(None, cause=Cause.CONTROL, reason=reason)

    def attach(self, inner: nn.Module) -> None:
        """Know the regions of the model as it is laid out; those an earlier attempt gave up are eager again."""
        if self._guard is None:
            return
        self._guard.attach(inner)
        if self.decision is not None:
            self._guard.give_up(self.decision.eager_regions)

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

    def compiles_from(self, step: int) -> bool:
        """Whether any step from `step` on will run compiled, as far as is known now."""
        coming = range(step, min(self._attempt.window.end_step, max(self._plan.last + 1, step)) + 1)
        return any(self.mode_of(one) is Mode.COMPILED for one in coming)

    @contextmanager
    def warming(self) -> Iterator[CompileGuard]:
        """Run compiled, and count the time as part of the first compiled pass."""
        assert self._guard is not None
        began = time.perf_counter()
        self._guard.run(Mode.COMPILED)
        yield self._guard
        self.warm_seconds = time.perf_counter() - began
        self.facts = self._guard.watch.read()

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

    def run_probe(self, run: Pass, prepared: Prepared, *, step: int) -> list[Complaint]:
        """Decide whether compiled is correct, and store it; returns what was made eager for it. Collective."""
        assert self._guard is not None
        limits = limits_for(self._attempt.compile.tolerances, self._attempt.training.precision)
        result = probe(run, inner=prepared.inner, guard=self._guard, limits=limits, ranks=self._ranks)
        if result.compiled_seconds is not None:
            result = replace(result, compiled_seconds=result.compiled_seconds + self.warm_seconds)
        self.facts = self._guard.watch.read()
        decision = judge_probe(result, limits)
        self.notices.about_breaks(self._guard.breaks, self._guard.regions)
        if decision.is_eager_throughout:
            fault = result.fault or FaultClass.NUMERICS
            complaint = Complaint(fault=fault, reason=decision.verdict.reason)
            self.fall_back(complaint, step=step, evidence=decision)
            return [complaint]
        for complaint in result.given_up:
            decision = give_up_regions(decision, complaint, names=self._guard.regions.eager, step=step)
        self._decide(decision)
        return list(result.given_up)

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

    def look(self, step: int, *, memory: MemoryUse | None = None) -> Complaint | None:
        """Read the compiler's counters after a backward; return what must become eager, and why."""
        if self._guard is None or self.gave_up:
            return None
        self.facts = self._guard.watch.read()
        events, regions = self._guard.watch.take(), self._guard.regions
        if events:
            self.notices.about_seconds(self.facts)
            is_warming = self._steps_here < WARM_STEPS
            return about_events(events, regions, self._storm, step=step, is_warming=is_warming)
        pressure = self._pressure.judge(memory)
        if not pressure or self.mode_of(step) is Mode.EAGER:
            return None
        return Complaint(fault=FaultClass.MEMORY_PRESSURE, reason=f"{pressure}; {REMEDIES[FaultClass.MEMORY_PRESSURE]}")

    def after_step(self, step: int, *, seconds: float, compiling: bool, peak: int | None = None) -> None:
        """Note the duration, and decide once the last timed step is over. Collective at that step."""
        self._steps_here += 1
        if self._steps_here == WARM_STEPS:
            self._recompiles_at_warm = self.facts.recompiles
        if self._guard is None:
            return
        time = StepTime(step=step, mode=self.mode_of(step), seconds=seconds, compiling=compiling)
        self._note(time)
        if peak is not None and not compiling:
            self._peaks = self._peaks.with_step(time.mode, peak)
        if step == self._plan.last and self.decision is not None and self.decision.cause is Cause.CORRECT:
            self._conclude()
        elif step > self._plan.last and self.verdict is not None:
            self.notices.add(self._slow_down.judge(time, eager_seconds=self.verdict.eager_step_seconds))

    def measures_peak(self, step: int) -> bool:
        """Whether the memory that this step needs is evidence: while both forms run in turn."""
        return self._guard is not None and self._plan.is_timed(step)

    def fall_back(self, complaint: Complaint, *, step: int, evidence: Decision | None = None) -> bool:
        """Make eager, from `step` on, what the complaint names. Every rank calls this between the same two steps.

        Returns whether anything changed: under memory pressure nothing does where eager needs as much. Collective.

        Raises:
            NoFallbackError: `spec.compile.fallback` is Fail.
        """
        assert self._guard is not None
        is_pressure = complaint.fault is FaultClass.MEMORY_PRESSURE
        if self._attempt.compile.fallback is Fallback.FAIL and not is_pressure:
            raise NoFallbackError(f"{complaint.reason}; spec.compile.fallback is Fail: Eager goes on without compiling")
        if is_pressure:
            obstacle = highest(self._ranks.gather(self._peaks)).why_not_eager
            if obstacle:
                self.notices.add(f"{complaint.reason}; it stays compiled: {obstacle}", once=obstacle)
                return False
        before, regions = evidence or self.decision, self._guard.regions
        is_partial = complaint.regions and not {*complaint.regions} >= {*regions.compiled}
        self._guard.give_up(complaint.regions if is_partial else regions.compiled)
        if is_partial and before is not None:
            self._times.clear()  # of another form
            self._decide(give_up_regions(before, complaint, names=regions.eager, step=step))
        else:
            self._guard.run(Mode.EAGER)
            self._decide(give_up_all(before, complaint, step=step))
        return True

    def obey(self, reason: str, *, step: int) -> None:
        """Eager from `step` on, because the deciding side asks for it; the next attempt is asked anew."""
        decision = give_up(self.decision, cause=Cause.CONTROL, reason=reason, step=step)
        self._decide(decision, keep=False)

    def blame(self, error: Exception, *, step: int) -> str:
        """Return what the next attempt runs eager, and why, if `error` came out of compiled code; else nothing.

        Not collective: one rank may have failed while its peers wait, so this attempt is lost. The verdict is stored
        for the next one. A mistake in the recipe's own code looks the same here, and will show itself there.
        """
        if self._guard is None or self._guard.mode is Mode.EAGER:
            return ""
        complaint = blamed(error, self._guard.regions)
        if complaint is None:
            return ""
        if complaint.regions and self.decision is not None:
            names = (*self._guard.regions.eager, *complaint.regions)
            decision, what = give_up_regions(self.decision, complaint, names=names, step=step), ", ".join(names)
        else:
            decision, what = give_up_all(self.decision, complaint, step=step), "this stage"
        store(decision, self._folder, stage=self._attempt.stage.name)
        return f"{complaint.reason}; the next attempt runs {what} eager"

    def give_up_next(self, reason: str) -> None:
        """Store that the next attempt runs this stage eager. Not collective: a peer is lost."""
        decision = give_up_all(self.decision, Complaint(fault=FaultClass.RANK_SKEW, reason=reason), step=0)
        store(decision, self._folder, stage=self._attempt.stage.name)

    def _note(self, taken: StepTime) -> None:
        """Keep only what is timed: a stage may have millions of steps."""
        if self._plan.is_timed(taken.step):
            self._times[taken.step] = taken

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
