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
from ctj_trainer.compile.timing import Speed

FILE = "verdict.json"


class Cause(StrEnum):
    """What a verdict rests on."""

    CORRECT = "Correct"  # provisional: timing is still to come
    MEASURED = "Measured"
    PROBE = "Probe"
    COMPILER = "Compiler"  # failure, recompile limit, storm
    CONTROL = "Control"


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """Relative differences between compiled and eager from equal state; `problem` where there is nothing to compare."""

    loss_relative: float | None = None
    grad_norm_relative: float | None = None
    compiled_seconds: float | None = None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A verdict and its cause."""

    cause: Cause
    verdict: CompileVerdict

    @property
    def is_eager_throughout(self) -> bool:
        """Eager from the first step on; a merely slow compiled form still runs until its timing ends, so that a restart
        repeats the same numbers."""
        return self.verdict.mode is Mode.EAGER and self.cause is not Cause.MEASURED


def judge_probe(probe: ProbeResult, limits: Limits) -> Decision:
    """Decide whether compiled is correct."""
    if probe.problem:
        return Decision(cause=Cause.COMPILER, verdict=_verdict(Mode.EAGER, probe.problem, probe))
    checks = {
        "loss": (probe.loss_relative, limits.probe_loss),
        "gradient norm": (probe.grad_norm_relative, limits.probe_grad_norm),
    }
    results = [evaluate(value, maximum=limit) for value, limit in checks.values()]
    said = ", ".join(f"{name} differs by {value:.1e} (allowed {limit:.0e})" for name, (value, limit) in checks.items())
    if worst(results) is not Verdict.PASSED:
        return Decision(cause=Cause.PROBE, verdict=_verdict(Mode.EAGER, f"Not equal to eager: {said}", probe))
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
            "reason": f"Correct, and {comparison} ({rule})",
            "eager_step_seconds": speed.eager_seconds,
            "compiled_step_seconds": speed.compiled_seconds,
            "speedup": speed.speedup,
            "break_even_steps": math.ceil(compile_seconds / saved) if saved > 0 else None,
        }
    )
    return Decision(cause=Cause.MEASURED, verdict=verdict)


def give_up(before: Decision | None, *, cause: Cause, reason: str) -> Decision:
    """Eager from here on, keeping the evidence so far."""
    update = {"mode": Mode.EAGER, "reason": reason[:512]}
    evidence = before.verdict if before else CompileVerdict(mode=Mode.EAGER, reason=reason[:512])
    return Decision(cause=cause, verdict=evidence.model_copy(update=update))


def store(decision: Decision, folder: Path, *, stage: str) -> None:
    """Write the decision into the attempt's folder."""
    document = {"stage": stage, "cause": decision.cause, **decision.verdict.to_document()}
    draft = folder / f".{FILE}.{os.getpid()}.tmp"
    draft.write_text(json.dumps(document))
    draft.replace(folder / FILE)


def stored(folders: Iterable[Path], *, stage: str) -> Decision | None:
    """Return the first decision about this stage among `folders`; an unreadable one counts as none."""
    for folder in folders:
        try:
            document = json.loads((folder / FILE).read_text())
            if document.pop("stage") == stage:
                return Decision(cause=Cause(document.pop("cause")), verdict=CompileVerdict.from_document(document))
        except (OSError, ValueError, KeyError):
            continue
    return None


def _verdict(mode: Mode, reason: str, probe: ProbeResult) -> CompileVerdict:
    return CompileVerdict(
        mode=mode,
        reason=reason[:512],
        probe_loss_relative=probe.loss_relative,
        probe_grad_norm_relative=probe.grad_norm_relative,
        first_compiled_seconds=probe.compiled_seconds,
    )
