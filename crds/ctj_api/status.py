"""What the deciding side has done and seen: the typed `status`. It is the whole memory of a job.

Written only by reconcile. `phase` is derived for people and never read back by it.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from ctj_api.attempt import CacheArchive, LineageEntry, Mode, Replay
from ctj_api.model import Contract, FigureString
from ctj_api.report import CheckpointRef
from ctj_api.spec import GateMode, Measurement, OnFailure
from ctj_api.thresholds import Verdict

Timestamp = Annotated[str, Field(json_schema_extra={"format": "date-time"})]


class Phase(StrEnum):
    """One word for people, derived from the conditions."""

    PENDING = "Pending"
    QUEUED = "Queued"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    HELD = "Held"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class ConditionType(StrEnum):
    """Every condition is set from first sight, `Unknown` where not known."""

    ACCEPTED = "Accepted"
    ADMITTED = "Admitted"
    RUNNING = "Running"
    PROGRESSING = "Progressing"
    COMPILED = "Compiled"
    GATE_PASSED = "GatePassed"
    DEGRADED = "Degraded"
    HELD = "Held"
    SUSPENDED = "Suspended"
    ROLLED_BACK = "RolledBack"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class ConditionStatus(StrEnum):
    """Whether a condition holds."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(Contract):
    """One aspect of the state, as other Kubernetes objects have them."""

    type: ConditionType
    status: ConditionStatus
    reason: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    message: Annotated[str, Field(max_length=4096)] = ""
    last_transition_time: Timestamp
    observed_generation: Annotated[int, Field(ge=0)] = 0


class Evidence(Contract):
    """One check of one gate, recomputable: verdict == thresholds.evaluate(value, min, max)."""

    measurement: Measurement
    value: FigureString | None = None
    min: FigureString | None = None
    max: FigureString | None = None
    verdict: Verdict


class GateVerdict(Contract):
    """One gate's outcome, final for its stage and attempt."""

    name: str
    mode: GateMode
    on_failure: OnFailure
    verdict: Verdict
    attempt: Annotated[int, Field(ge=1)]
    evidence: list[Evidence]
    note: Annotated[str, Field(max_length=512, description="Checks that do not apply here, and why.")] = ""


class StagePhase(StrEnum):
    """Where a stage of the ladder stands."""

    PENDING = "Pending"
    RUNNING = "Running"
    PASSED = "Passed"
    FAILED = "Failed"
    SKIPPED = "Skipped"


class StageStatus(Contract):
    """What is known of one stage."""

    name: str
    phase: StagePhase = StagePhase.PENDING
    attempts: Annotated[list[int], Field(default_factory=list, max_length=64)]
    mode: Mode | None = None
    start_step: Annotated[int, Field(ge=0)] = 0
    end_step: Annotated[int, Field(ge=0)] = 0
    checkpoint: CheckpointRef | None = None
    gates: Annotated[list[GateVerdict], Field(default_factory=list, max_length=40)]
    measurements: Annotated[dict[Measurement, FigureString], Field(default_factory=dict)]
    compile_reason: Annotated[str, Field(max_length=512)] = ""
    predicted_memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    started_at: Timestamp | None = None
    finished_at: Timestamp | None = None
    message: Annotated[str, Field(max_length=1024)] = ""
    eager_because: Annotated[
        str, Field(max_length=256, description="Why its attempts no longer compile; empty: they may.")
    ] = ""
    retry_compile: Annotated[bool, Field(description="Its next attempt measures compiled against eager again.")] = False
    micro_batch_size: Annotated[int | None, Field(ge=1, description="Smaller than the spec's after out-of-memory.")] = (
        None
    )
    lineage: Annotated[
        list[LineageEntry],
        Field(
            default_factory=list,
            max_length=64,
            description="Checkpoints its next attempt may continue from, oldest first.",
        ),
    ]


class CurrentAttempt(Contract):
    """The recorded intention to run one attempt; the child is created after this is stored."""

    attempt: Annotated[int, Field(ge=1)]
    stage: str
    mode: Mode
    micro_batch_size: Annotated[int, Field(ge=1)]
    floor_step: Annotated[int, Field(ge=0)]
    lineage: Annotated[list[LineageEntry], Field(default_factory=list, max_length=64)]
    replay: Replay | None = None
    generation: Annotated[int, Field(ge=0)]
    spec_hash: Annotated[
        str, Field(max_length=64, description="Of what this attempt was built from; a change replaces it.")
    ] = ""
    recorded_at: Timestamp
    requested_at: Annotated[Timestamp, Field(description="When the child was last asked for.")]
    child_seen: Annotated[
        bool, Field(description="Its pods were seen past Pending: its absence is a loss from now on.")
    ] = False
    running_since: Timestamp | None = None
    accounted_at: Annotated[Timestamp | None, Field(description="Running time up to here is in activeSeconds.")] = None
    first_step_seen: bool = False
    checkpoint_step: Annotated[
        int | None, Field(description="Newest complete checkpoint this attempt made, as far as known.")
    ] = None
    retry_compile: bool = False
    control_sequence: Annotated[int, Field(ge=0)] = 0
    compile_control: Mode = Mode.COMPILED
    stopping: Annotated[
        str, Field(max_length=256, description="Why the attempt is being stopped; empty while it may run.")
    ] = ""
    stopping_since: Timestamp | None = None


class Remedy(Contract):
    """Something the operator did to keep the job going, and why."""

    what: Annotated[str, Field(description="Fallback, Rollback, Restart, Hold, SmallerMicroBatch, ...")]
    reason: Annotated[str, Field(max_length=128)]
    evidence: Annotated[str, Field(max_length=1024)]
    attempt: Annotated[int, Field(ge=0)]
    step: Annotated[int, Field(ge=0)]
    at: Timestamp


class Stable(Contract):
    """Last stage that passed its gates, and the checkpoint to go back to."""

    stage: str
    mode: Mode
    checkpoint: CheckpointRef


class Restarts(Contract):
    """Spent budget since `since_step`, the newest checkpoint when it was last reset, and totals for people."""

    failures: int = 0
    disruptions: int = 0
    since_step: int = 0
    total: int = 0


class FirstFailure(Contract):
    """First cause of the newest failure."""

    pod: str
    rank: int | None = None
    node: str = ""
    exit_code: int | None = None
    reason: Annotated[str, Field(max_length=64)] = ""
    last_lines: Annotated[str, Field(max_length=1500)] = ""
    attempt: Annotated[int, Field(ge=1)]


class HoldState(Contract):
    """Since when and why a person is waited for."""

    since: Timestamp
    deadline: Timestamp
    reason: Annotated[str, Field(max_length=128)]
    message: Annotated[str, Field(max_length=1024)] = ""


class Status(Contract):
    """What has been done and seen."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    phase: Phase = Phase.PENDING
    stage: str = ""
    mode: Mode | None = None
    step: Annotated[int, Field(ge=0)] = 0
    progress_percentage: Annotated[int, Field(ge=0, le=100)] = 0
    estimated_remaining_seconds: int | None = None
    attempt: Annotated[int, Field(ge=0, description="One counter for the life of the job, never reused.")] = 0
    current: CurrentAttempt | None = None
    stable: Stable | None = None
    compile_cache: Annotated[
        CacheArchive | None, Field(description="Compiled code that the next attempt may start with.")
    ] = None
    ladder: Annotated[list[StageStatus], Field(default_factory=list, max_length=4)]
    remedies: Annotated[list[Remedy], Field(default_factory=list, max_length=64)]
    fallbacks_used: int = 0
    rollbacks_used: int = 0
    non_finite_used: bool = False
    restarts: Annotated[Restarts, Field(default_factory=Restarts)]
    first_failure: FirstFailure | None = None
    hold: HoldState | None = None
    handled: Annotated[dict[str, str], Field(default_factory=dict, json_schema_extra={"maxProperties": 64})]
    retry_token: str = ""
    gpu_seconds: float = 0.0
    active_seconds: float = 0.0
    progress_at: Annotated[
        Timestamp | None, Field(description="When step and the running totals were last written.")
    ] = None
    started_at: Timestamp | None = None
    finished_at: Timestamp | None = None
    conditions: Annotated[
        list[Condition],
        Field(
            max_length=16,
            default_factory=list,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ]
