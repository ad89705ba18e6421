"""What must a stage show, and what follows if it does not?"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from ctj_api.model import Contract, DecimalString, DnsLabel, DurationString


class GateMode(StrEnum):
    """Whether a failed gate acts (Enforce) or is only recorded (DryRun)."""

    ENFORCE = "Enforce"
    DRY_RUN = "DryRun"


class OnFailure(StrEnum):
    """What follows a failed gate: same stage in eager mode, the last good stage, a person decides, or the end."""

    FALLBACK = "Fallback"
    ROLLBACK = "Rollback"
    HOLD = "Hold"
    FAIL = "Fail"


class Measurement(StrEnum):
    """What a stage's report measures, and a gate may therefore look at (units in the name)."""

    NON_FINITE_STEPS = "nonFiniteSteps"
    PROBE_LOSS_RELATIVE = "probeLossRelative"
    PROBE_GRAD_NORM_RELATIVE = "probeGradNormRelative"
    REPLAY_LOSS_RELATIVE = "replayLossRelative"
    REPLAY_GRAD_NORM_RELATIVE = "replayGradNormRelative"
    MEMORY_PEAK_RATIO = "memoryPeakRatio"
    RECOMPILES_AFTER_WARMUP = "recompilesAfterWarmup"
    GRAPH_BREAKS = "graphBreaks"
    COMPILE_SECONDS = "compileSeconds"
    CACHE_HIT_RATIO = "cacheHitRatio"
    SAMPLES_PER_SECOND_PER_PROCESS = "samplesPerSecondPerProcess"
    THROUGHPUT_RATIO = "throughputRatio"
    STEP_TIME_P50_SECONDS = "stepTimeP50Seconds"
    STEP_TIME_P95_SECONDS = "stepTimeP95Seconds"
    FINAL_LOSS = "finalLoss"
    EVALUATION_LOSS = "evaluationLoss"
    SKIPPED_STEPS = "skippedSteps"


class ThresholdRange(Contract):
    """Limits, both inclusive; at least one."""

    min: Annotated[DecimalString | None, Field(description="Fails below.")] = None
    max: Annotated[DecimalString | None, Field(description="Fails above.")] = None


class GateSource(Contract):
    """Where the number comes from."""

    report: Annotated[Measurement, Field(description="A measurement of the stage's report.")]


class Gate(Contract):
    """One condition that a stage must meet before the next, larger one may start."""

    name: Annotated[
        DnsLabel,
        Field(description="The name of a default gate replaces that gate, in the stages that this one is for."),
    ]
    stages: Annotated[
        list[DnsLabel], Field(max_length=4, default_factory=list, description="Names of stages; every stage if absent.")
    ]
    source: GateSource
    threshold_range: ThresholdRange
    mode: GateMode = GateMode.ENFORCE
    on_failure: OnFailure = OnFailure.ROLLBACK


class HoldTimeout(StrEnum):
    """What happens when nobody decides in time."""

    FAIL = "Fail"
    ROLLBACK = "Rollback"


class Hold(Contract):
    """How long a held job waits for a person; it keeps its checkpoint and no GPU."""

    timeout: Annotated[DurationString, Field(description="Longest wait, as in 24h or 1h30m.")] = "24h"
    on_timeout: HoldTimeout = HoldTimeout.FAIL


class Remedies(Contract):
    """How often the job may help itself before a person is asked."""

    max_fallbacks: Annotated[int, Field(ge=0, le=100, description="Changes to eager mode.")] = 2
    max_rollbacks: Annotated[int, Field(ge=0, le=100, description="Returns to the last good stage.")] = 1
    hold: Annotated[Hold, Field(default_factory=Hold)]


class Restart(Contract):
    """Budgets; each counts since the last new complete checkpoint."""

    max_failures: Annotated[int, Field(ge=0, le=1000, description="Failed attempts that may be repeated.")] = 3
    max_disruptions: Annotated[
        int, Field(ge=0, le=1000, description="Attempts lost to eviction, preemption or a lost node.")
    ] = 20
