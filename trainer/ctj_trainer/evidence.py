"""What does a stage prove? The replay's differences and the measurements that gates look at. Pure, no torch."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ctj_api.attempt import Attempt, Mode, Replay
from ctj_api.report import CompileVerdict
from ctj_api.spec import Measurement, Precision
from ctj_trainer.compile.timing import WARM_STEPS
from ctj_trainer.records import StepRecord


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """What each rank measures for itself; the worst of them counts."""

    memory_peak_ratio: float | None
    recompiles_after_warmup: int
    graph_breaks: int
    compile_seconds: float
    cache_hit_ratio: float | None = None
    """Of look-ups in the compile cache; None where nothing was looked up."""


def replay_differences(
    reference: Mapping[int, StepRecord], ours: Mapping[int, StepRecord], replay: Replay
) -> dict[Measurement, float]:
    """Largest relative differences over the window; nothing if a step lacks a record on either side."""
    steps = range(replay.from_step + 1, replay.to_step + 1)
    if any(step not in reference or step not in ours for step in steps):
        return {}
    pairs = [(ours[step], reference[step]) for step in steps]
    return {
        Measurement.REPLAY_LOSS_RELATIVE: max(relative_difference(a.loss, b.loss) for a, b in pairs),
        Measurement.REPLAY_GRAD_NORM_RELATIVE: max(relative_difference(a.grad_norm, b.grad_norm) for a, b in pairs),
    }


def relative_difference(value: float, reference: float) -> float:
    """|value - reference| / |reference|; infinite where one of them is not finite and they differ."""
    if value == reference:
        return 0.0
    if not (math.isfinite(value) and math.isfinite(reference)):
        return math.inf
    return abs(value - reference) / max(abs(reference), 1e-30)


def measure(
    attempt: Attempt,
    *,
    steps: Mapping[int, StepRecord],
    reference: Mapping[int, StepRecord],
    verdict: CompileVerdict | None,
    ranks: Sequence[RankFigures],
) -> dict[Measurement, float]:
    """Every measurement this stage has; what was not measured is absent. `throughputRatio` takes two stages."""
    records = [steps[step] for step in sorted(steps)]
    non_finite = [r for r in records if not (r.skipped or (math.isfinite(r.loss) and math.isfinite(r.grad_norm)))]
    ratios = [r.memory_peak_ratio for r in ranks if r.memory_peak_ratio is not None]
    hit_ratios = [r.cache_hit_ratio for r in ranks if r.cache_hit_ratio is not None]
    found: dict[Measurement, float | None] = {
        Measurement.NON_FINITE_STEPS: len(non_finite),
        Measurement.MEMORY_PEAK_RATIO: max(ratios, default=None),
        Measurement.RECOMPILES_AFTER_WARMUP: max(r.recompiles_after_warmup for r in ranks),
        Measurement.GRAPH_BREAKS: max(r.graph_breaks for r in ranks),
        Measurement.COMPILE_SECONDS: max(r.compile_seconds for r in ranks),
        Measurement.CACHE_HIT_RATIO: min(hit_ratios, default=None),
        Measurement.FINAL_LOSS: records[-1].loss if records else None,
        Measurement.EVALUATION_LOSS: next(
            (r.evaluation_loss for r in reversed(records) if r.evaluation_loss is not None), None
        ),
        Measurement.SKIPPED_STEPS: sum(r.skipped for r in records)
        if attempt.training.precision is Precision.FP16
        else None,
    }
    if verdict is not None:
        found[Measurement.PROBE_LOSS_RELATIVE] = verdict.probe_loss_relative
        found[Measurement.PROBE_GRAD_NORM_RELATIVE] = verdict.probe_grad_norm_relative
    if attempt.replay is not None:
        found |= replay_differences(reference, steps, attempt.replay)
    found |= _step_times(attempt, records)
    return {name: float(value) for name, value in found.items() if value is not None}


def _step_times(attempt: Attempt, records: Sequence[StepRecord]) -> dict[Measurement, float | None]:
    """Times of the form the stage ended in, without warm-up and without steps that compiled."""
    warm = records[WARM_STEPS:]
    mode = records[-1].mode if records else Mode.EAGER
    seconds = sorted(r.seconds for r in warm if r.mode is mode and not r.compiling)
    if not seconds:
        return {}
    median = statistics.median(seconds)
    return {
        Measurement.STEP_TIME_P50_SECONDS: median,
        Measurement.STEP_TIME_P95_SECONDS: seconds[math.ceil(0.95 * len(seconds)) - 1],
        Measurement.SAMPLES_PER_SECOND_PER_PROCESS: attempt.training.global_batch_size
        / median
        / attempt.stage.world_size,
    }
