"""Whether a finished stage may be promoted: the gates, their limits, and the evidence. Promotion itself is `finishing`.

A missing measurement is Inconclusive: it never passes and never condemns. A measurement that cannot exist (no replay in
the first stage, no probe in an eager one) is left out and the verdict says so.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ctj_api.spec import Gate, GateMode, Measurement, OnFailure, Spec
from ctj_api.status import Evidence, GateVerdict
from ctj_api.thresholds import Verdict, evaluate, worst
from ctj_api.tolerances import completed

MAX_MEMORY_RATIO = "0.95"
MAX_RECOMPILES = "2"
MIN_THROUGHPUT_RATIO = "0.7"

_OF_COMPILED = frozenset(
    {
        Measurement.PROBE_LOSS_RELATIVE,
        Measurement.PROBE_GRAD_NORM_RELATIVE,
        Measurement.RECOMPILES_AFTER_WARMUP,
        Measurement.GRAPH_BREAKS,
        Measurement.COMPILE_SECONDS,
        Measurement.CACHE_HIT_RATIO,
    }
)
_OF_REPLAY = frozenset({Measurement.REPLAY_LOSS_RELATIVE, Measurement.REPLAY_GRAD_NORM_RELATIVE})


@dataclass(frozen=True, kw_only=True)
class Check:
    """One measurement and its limits, both inclusive."""

    measurement: Measurement
    min: str | None = None
    max: str | None = None


@dataclass(frozen=True, kw_only=True)
class GateRule:
    """One gate: all its checks must pass."""

    name: str
    mode: GateMode
    on_failure: OnFailure
    checks: tuple[Check, ...]


@dataclass(frozen=True, kw_only=True)
class StageEvidence:
    """What a finished stage measured, and which measurements could exist at all."""

    attempt: int
    measurements: Mapping[Measurement, float]
    compiled: bool
    """It ran compiled to its end; a stage that went eager has no compiled steps to judge."""
    replayed: bool
    """It repeated steps of the stage before."""
    has_predecessor: bool


def rules(spec: Spec, stage: str) -> tuple[GateRule, ...]:
    """Return the gates of one stage: the defaults, replaced or joined by those of the spec's that apply to it."""
    own = [_rule(gate) for gate in spec.gates if not gate.stages or stage in gate.stages]
    replaced = {rule.name for rule in own}
    kept = [rule for rule in _default_rules(spec) if rule.name not in replaced]
    return (*kept, *own)


def _rule(gate: Gate) -> GateRule:
    limits = gate.threshold_range
    check = Check(measurement=gate.source.report, min=limits.min, max=limits.max)
    return GateRule(name=gate.name, mode=gate.mode, on_failure=gate.on_failure, checks=(check,))


def _default_rules(spec: Spec) -> tuple[GateRule, ...]:
    allowed = completed(spec.compile.tolerances, spec.training.precision)
    # FSDP and ZeRO-3 are slower than DDP on CPU by nature, so there the ratio is only shown.
    on_accelerator = any(stage.gpus_per_node for stage in spec.ladder)
    throughput_mode = GateMode.ENFORCE if on_accelerator else GateMode.DRY_RUN
    return (
        GateRule(
            name="finite",
            mode=GateMode.ENFORCE,
            on_failure=OnFailure.FAIL,
            checks=(Check(measurement=Measurement.NON_FINITE_STEPS, max="0"),),
        ),
        GateRule(
            name="parity",
            mode=GateMode.ENFORCE,
            on_failure=OnFailure.ROLLBACK,
            checks=(
                Check(measurement=Measurement.PROBE_LOSS_RELATIVE, max=allowed.probe_loss),
                Check(measurement=Measurement.PROBE_GRAD_NORM_RELATIVE, max=allowed.probe_grad_norm),
                Check(measurement=Measurement.REPLAY_LOSS_RELATIVE, max=allowed.window_loss),
                Check(measurement=Measurement.REPLAY_GRAD_NORM_RELATIVE, max=allowed.window_grad_norm),
            ),
        ),
        GateRule(
            name="memory",
            mode=GateMode.ENFORCE,
            on_failure=OnFailure.FALLBACK,
            checks=(Check(measurement=Measurement.MEMORY_PEAK_RATIO, max=MAX_MEMORY_RATIO),),
        ),
        GateRule(
            name="recompiles",
            mode=GateMode.ENFORCE,
            on_failure=OnFailure.FALLBACK,
            checks=(Check(measurement=Measurement.RECOMPILES_AFTER_WARMUP, max=MAX_RECOMPILES),),
        ),
        GateRule(
            name="throughput",
            mode=throughput_mode,
            on_failure=OnFailure.ROLLBACK,
            checks=(Check(measurement=Measurement.THROUGHPUT_RATIO, min=MIN_THROUGHPUT_RATIO),),
        ),
    )


def judge(stage_rules: tuple[GateRule, ...], evidence: StageEvidence) -> list[GateVerdict]:
    """Evaluate every gate that applies, with all exceeded limits, not only the first."""
    return [verdict for rule in stage_rules if (verdict := _judge_one(rule, evidence)) is not None]


def _judge_one(rule: GateRule, evidence: StageEvidence) -> GateVerdict | None:
    left_out = {check.measurement: _why_not(check.measurement, evidence) for check in rule.checks}
    shown = [_shown(check, evidence) for check in rule.checks if not left_out[check.measurement]]
    if not shown:
        return None
    reasons = dict.fromkeys(f"{name} left out: {why}" for name, why in left_out.items() if why)
    return GateVerdict(
        name=rule.name,
        mode=rule.mode,
        on_failure=rule.on_failure,
        verdict=worst([one.verdict for one in shown]),
        attempt=evidence.attempt,
        evidence=shown,
        note="; ".join(reasons)[:512],
    )


def _why_not(measurement: Measurement, evidence: StageEvidence) -> str:
    """Return why this measurement cannot exist for this stage, or nothing."""
    if measurement in _OF_COMPILED and not evidence.compiled:
        return "the stage ran eager"
    if measurement in _OF_REPLAY and not evidence.replayed:
        return "there is no earlier stage to repeat steps of"
    if measurement is Measurement.THROUGHPUT_RATIO and not evidence.has_predecessor:
        return "there is no earlier stage to compare with"
    return ""


def _shown(check: Check, evidence: StageEvidence) -> Evidence:
    value = evidence.measurements.get(check.measurement)
    verdict = evaluate(value, minimum=_number(check.min), maximum=_number(check.max))
    return Evidence(
        measurement=check.measurement,
        value=None if value is None else figure(value),
        min=check.min,
        max=check.max,
        verdict=verdict,
    )


def _number(text: str | None) -> float | None:
    return None if text is None else float(text)


def figure(value: float) -> str:
    """Write a number so that reading it back gives the very same number: evidence can be recomputed."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return repr(float(value))


def enforced(verdicts: list[GateVerdict]) -> list[GateVerdict]:
    """Return the gates that count; a dry run is shown and never blocks."""
    return [verdict for verdict in verdicts if verdict.mode is GateMode.ENFORCE]


def blocking(verdicts: list[GateVerdict], outcome: Verdict) -> list[GateVerdict]:
    """Return the enforced gates with this outcome."""
    return [verdict for verdict in enforced(verdicts) if verdict.verdict is outcome]


def described(verdicts: list[GateVerdict]) -> str:
    """Say for people which limits were exceeded, or which figures are missing."""
    return "; ".join(_described_one(verdict) for verdict in verdicts)


def _described_one(verdict: GateVerdict) -> str:
    parts = [_described_check(one) for one in verdict.evidence if one.verdict is verdict.verdict]
    return f"{verdict.name}: {', '.join(parts)}"


def _described_check(one: Evidence) -> str:
    if one.value is None:
        return f"{one.measurement} was not measured"
    if one.verdict is Verdict.PASSED:
        return f"{one.measurement} {short(one.value)}"
    limits = [f"max {one.max}" if one.max is not None else "", f"min {one.min}" if one.min is not None else ""]
    return (
        f"{one.measurement} is {short(one.value)} ({', '.join(limit for limit in limits if limit) or 'must be finite'})"
    )


def short(value: str) -> str:
    """Round a figure for people."""
    number = float(value)
    return f"{number:.3g}" if math.isfinite(number) else value
