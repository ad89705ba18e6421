"""Compiled or eager for the rest of the stage? Decided once from evidence, stored, and reused after a restart."""

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ctj_api.attempt import Mode
from ctj_api.report import CompileVerdict
from ctj_api.spec import Compile, Keep
from ctj_api.thresholds import Verdict, evaluate, worst
from ctj_api.tolerances import Limits
from ctj_trainer.compile.causes import FaultClass
from ctj_trainer.compile.complaint import Complaint
from ctj_trainer.compile.timing import Speed

FILE = "verdict.json"


class Cause(StrEnum):
    """What a verdict rests on."""

    CORRECT = "Correct"  # provisional: timing is still to come
    MEASURED = "Measured"
    PROBE = "Probe"
    COMPILER = "Compiler"  # failure, recompile limit, storm
    MEMORY = "Memory"
    CONTROL = "Control"


_CAUSE_OF_FAULT = {FaultClass.NUMERICS: Cause.PROBE, FaultClass.MEMORY_PRESSURE: Cause.MEMORY}
_NAMES_LENGTH = 160


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """Relative differences between compiled and eager from equal state; `problem` where there is nothing to compare.

    `given_up`: what was made eager before these figures were taken.
    """

    loss_relative: float | None = None
    grad_norm_relative: float | None = None
    compiled_seconds: float | None = None
    problem: str = ""
    fault: FaultClass | None = None
    given_up: tuple[Complaint, ...] = ()

    def __str__(self) -> str:
        return f"loss by {self.loss_relative:.1e}, gradient norm by {self.grad_norm_relative:.1e}"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A verdict and its cause. `eager_regions`: those that stay eager while the others run compiled."""

    cause: Cause
    verdict: CompileVerdict
    eager_regions: tuple[str, ...] = ()

    @property
    def is_eager_throughout(self) -> bool:
        """Eager from the first step on; a merely slow compiled form still runs until its timing ends, so that a restart
        repeats the same numbers."""
        return self.verdict.mode is Mode.EAGER and self.cause is not Cause.MEASURED


def judge_probe(probe: ProbeResult, limits: Limits) -> Decision:
    """Decide whether compiled is correct."""
    if probe.problem:
        return Decision(cause=Cause.COMPILER, verdict=_verdict(Mode.EAGER, probe.problem, probe, fault=probe.fault))
    checks = {
        "loss": (probe.loss_relative, limits.probe_loss),
        "gradient norm": (probe.grad_norm_relative, limits.probe_grad_norm),
    }
    results = [evaluate(value, maximum=limit) for value, limit in checks.values()]
    said = ", ".join(f"{name} differs by {value:.1e} (allowed {limit:.0e})" for name, (value, limit) in checks.items())
    if worst(results) is not Verdict.PASSED:
        verdict = _verdict(Mode.EAGER, f"Not equal to eager: {said}", probe, fault=FaultClass.NUMERICS)
        return Decision(cause=Cause.PROBE, verdict=verdict)
    return Decision(cause=Cause.CORRECT, verdict=_verdict(Mode.COMPILED, f"Correct: {said}; not timed", probe))


def judge_speed(correct: Decision, speed: Speed | None, settings: Compile, *, compile_seconds: float) -> Decision:
    """Decide between two correct forms. Without a timing compiled stays: the stage is short, and so is its cost."""
    if speed is None:
        return correct
    minimum = float(settings.min_speedup)
    is_faster = evaluate(speed.speedup, minimum=minimum) is Verdict.PASSED
    keep = is_faster or settings.keep is Keep.IF_CORRECT
    comparison = f"{speed.speedup:.2f} times as fast as eager"
    rule = "keep: IfCorrect" if settings.keep is Keep.IF_CORRECT else f"minSpeedup {minimum}"
    saved = speed.eager_seconds - speed.compiled_seconds
    verdict = correct.verdict.model_copy(
        update={
            "mode": Mode.COMPILED if keep else Mode.EAGER,
            "reason": _with_regions(f"Correct, and {comparison} ({rule})", correct.verdict),
            "eager_step_seconds": speed.eager_seconds,
            "compiled_step_seconds": speed.compiled_seconds,
            "speedup": speed.speedup,
            "break_even_steps": math.ceil(compile_seconds / saved) if saved > 0 else None,
        }
    )
    return Decision(cause=Cause.MEASURED, verdict=verdict, eager_regions=correct.eager_regions)


def give_up(
    before: Decision | None, *, cause: Cause, reason: str, fault: str = "", step: int | None = None
) -> Decision:
    """Eager from here on, keeping the evidence so far."""
    evidence = before.verdict if before else CompileVerdict(mode=Mode.EAGER, reason=reason[:512])
    update = {"mode": Mode.EAGER, "reason": reason[:512], "fault": fault or None, "eager_from_step": step}
    return Decision(cause=cause, verdict=evidence.model_copy(update={**update, "eager_regions": ""}))


def give_up_all(before: Decision | None, complaint: Complaint, *, step: int) -> Decision:
    """Nothing is compiled any more."""
    cause = _CAUSE_OF_FAULT.get(complaint.fault, Cause.COMPILER)
    return give_up(before, cause=cause, reason=complaint.reason, fault=complaint.fault, step=step)


def give_up_regions(before: Decision, complaint: Complaint, *, names: tuple[str, ...], step: int) -> Decision:
    """Leave some regions eager, `names` being all of them; the others go on compiled, as they were judged."""
    said = f"{', '.join(names)[:_NAMES_LENGTH]} ({len(names)}): {complaint.reason}"
    update = {"eager_regions": said[:512], "fault": complaint.fault, "eager_from_step": step}
    verdict = before.verdict.model_copy(update=update)
    base = before.verdict.reason.partition("; eager: ")[0]
    verdict = verdict.model_copy(update={"reason": _with_regions(base, verdict)})
    return Decision(cause=before.cause, verdict=verdict, eager_regions=names)


def _with_regions(reason: str, verdict: CompileVerdict) -> str:
    return (f"{reason}; eager: {verdict.eager_regions}" if verdict.eager_regions else reason)[:512]


def store(decision: Decision, folder: Path, *, stage: str) -> None:
    """Write the decision into the attempt's folder."""
    document = {
        "stage": stage,
        "cause": decision.cause,
        "regions": decision.eager_regions,
        **decision.verdict.to_document(),
    }
    draft = folder / f".{FILE}.{os.getpid()}.tmp"
    draft.write_text(json.dumps(document))
    draft.replace(folder / FILE)


def stored(folders: Iterable[Path], *, stage: str) -> Decision | None:
    """Return the first decision about this stage among `folders`; an unreadable one counts as none."""
    for folder in folders:
        try:
            document = json.loads((folder / FILE).read_text())
            if document.pop("stage") == stage:
                return Decision(
                    cause=Cause(document.pop("cause")),
                    eager_regions=tuple(document.pop("regions", ())),
                    verdict=CompileVerdict.from_document(document),
                )
        except (OSError, ValueError, KeyError):
            continue
    return None


def _verdict(mode: Mode, reason: str, probe: ProbeResult, *, fault: FaultClass | None = None) -> CompileVerdict:
    return CompileVerdict(
        mode=mode,
        reason=reason[:512],
        fault=fault,
        probe_loss_relative=probe.loss_relative,
        probe_grad_norm_relative=probe.grad_norm_relative,
        first_compiled_seconds=probe.compiled_seconds,
    )
