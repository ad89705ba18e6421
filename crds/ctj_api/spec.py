"""What a person may ask for: the typed `spec` of a CompiledTrainingJob.

Field constraints here become the CRD's schema (`schema.py`); rules over several fields are CEL, in `rules.py`.
Descriptions are what `kubectl explain` prints.
"""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from ctj_api.model import RECIPE_NAME, Contract, DecimalString, DnsLabel, DurationString, PositiveDecimalString

FreeForm = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]


class Strategy(StrEnum):
    """How parameters and gradients are laid out over processes, in ladder order."""

    SINGLE = "single"
    DDP = "ddp"
    FSDP = "fsdp"
    ZERO3 = "zero3"


class Precision(StrEnum):
    FP32 = "fp32"
    BF16 = "bf16"


class ActivationCheckpointing(StrEnum):
    NONE = "None"
    BLOCKS = "Blocks"


class CompileScope(StrEnum):
    REGIONAL = "regional"
    FULL = "full"
    DISABLED = "disabled"


class Keep(StrEnum):
    """When the compiled form is kept after the first stage's comparison with eager."""

    IF_FASTER = "IfFaster"
    IF_CORRECT = "IfCorrect"


class Dynamic(StrEnum):
    AUTO = "Auto"
    STATIC = "Static"
    DYNAMIC = "Dynamic"


class GateMode(StrEnum):
    ENFORCE = "Enforce"
    DRY_RUN = "DryRun"


class OnFailure(StrEnum):
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
    SAMPLES_PER_SECOND_PER_PROCESS = "samplesPerSecondPerProcess"
    THROUGHPUT_RATIO = "throughputRatio"
    STEP_TIME_P50_SECONDS = "stepTimeP50Seconds"
    STEP_TIME_P95_SECONDS = "stepTimeP95Seconds"
    FINAL_LOSS = "finalLoss"


class Volume(Contract):
    claim_name: Annotated[
        str, Field(min_length=1, max_length=253, description="A PersistentVolumeClaim of the job's namespace.")
    ]


class Recipe(Contract):
    name: Annotated[
        str,
        Field(
            min_length=1,
            max_length=253,
            pattern=RECIPE_NAME,
            description="Built-in recipe (causal_lm) or module:function of your own.",
        ),
    ]
    config: Annotated[FreeForm, Field(default_factory=dict, description="Owned and checked by the recipe.")]


class Optimizer(Contract):
    learning_rate: Annotated[PositiveDecimalString, Field(description="Peak rate of AdamW.")] = "3e-4"
    warmup_steps: Annotated[
        int, Field(ge=0, le=1_000_000, description="Linear warm-up, then cosine to minimumRate.")
    ] = 0
    weight_decay: Annotated[PositiveDecimalString, Field(description="Decoupled decay, matrices only.")] = "0.1"
    minimum_rate: Annotated[PositiveDecimalString, Field(description="End of the cosine as a share of learningRate.")] = "0.1"
    gradient_clip: Annotated[PositiveDecimalString, Field(description="Global gradient norm limit; 0 turns it off.")] = "1.0"


class CheckpointPolicy(Contract):
    every_steps: Annotated[int, Field(ge=1, le=1_000_000, description="Optimizer steps between checkpoints.")] = 100
    keep: Annotated[int, Field(ge=1, le=100, description="Newest checkpoints kept; pinned ones come on top.")] = 3
    volume: Volume | None = None


class Training(Contract):
    steps: Annotated[int, Field(ge=1, le=100_000_000, description="Optimizer steps of the whole ladder.")]
    global_batch_size: Annotated[
        int, Field(ge=1, le=1_000_000, description="Sequences per optimizer step, in every stage.")
    ]
    micro_batch_size: Annotated[int, Field(ge=1, le=65_536, description="Sequences per process and forward.")]
    precision: Precision = Precision.FP32
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE
    optimizer: Annotated[Optimizer, Field(default_factory=Optimizer)]
    checkpoint: Annotated[CheckpointPolicy, Field(default_factory=CheckpointPolicy)]


class Stage(Contract):
    name: Annotated[DnsLabel, Field(max_length=20)]
    strategy: Strategy
    steps: Annotated[
        int | None, Field(ge=1, le=100_000_000, description="Canary window; absent in the last stage.")
    ] = None
    nodes: Annotated[int, Field(ge=1, le=1000)] = 1
    gpus_per_node: Annotated[int | None, Field(ge=1, le=64, description="GPUs, and one process for each.")] = None
    processes_per_node: Annotated[int | None, Field(ge=1, le=64, description="Processes when no GPU is asked for.")] = (
        None
    )
    replay_steps: Annotated[
        int | None, Field(ge=0, le=1000, description="Steps the next stage repeats; default min(5, steps / 4).")
    ] = None

    @property
    def local_processes(self) -> int:
        """Processes on each node."""
        return self.gpus_per_node or self.processes_per_node or 1

    @property
    def world_size(self) -> int:
        """Processes of the whole stage."""
        return self.nodes * self.local_processes


class Tolerances(Contract):
    """Relative differences allowed; defaults depend on the precision (`gates.py`)."""

    probe_loss: DecimalString | None = None
    probe_grad_norm: DecimalString | None = None
    window_loss: DecimalString | None = None
    window_grad_norm: DecimalString | None = None


class CompileCache(Contract):
    volume: Volume


class Compile(Contract):
    scope: CompileScope = CompileScope.REGIONAL
    backend: Annotated[str, Field(min_length=1, max_length=64, description="A backend of the installed torch.")] = (
        "inductor"
    )
    mode: Annotated[str | None, Field(min_length=1, max_length=64, description="One of mode and options.")] = None
    options: Annotated[FreeForm | None, Field(description="Inductor options; one of mode and options.")] = None
    dynamic: Dynamic = Dynamic.AUTO
    recompile_limit: Annotated[int, Field(ge=1, le=1024, description="After this many a region runs eager.")] = 8
    keep: Keep = Keep.IF_FASTER
    min_speedup: Annotated[PositiveDecimalString, Field(description="Eager time / compiled time asked by IfFaster.")] = "1.03"
    tolerances: Annotated[Tolerances, Field(default_factory=Tolerances)]
    timeout_seconds: Annotated[int, Field(ge=1, le=86_400, description="Longest wait for a rank that compiles.")] = 1800
    cache: CompileCache | None = None


class ThresholdRange(Contract):
    min: DecimalString | None = None
    max: DecimalString | None = None


class GateSource(Contract):
    report: Annotated[Measurement, Field(description="A measurement of the stage's report.")]


class Gate(Contract):
    name: Annotated[DnsLabel, Field(description="A default gate's name replaces that gate.")]
    stages: Annotated[list[DnsLabel], Field(max_length=4, default_factory=list, description="Empty: every stage.")]
    source: GateSource
    threshold_range: ThresholdRange
    mode: GateMode = GateMode.ENFORCE
    on_failure: OnFailure = OnFailure.ROLLBACK


class HoldTimeout(StrEnum):
    FAIL = "Fail"
    ROLLBACK = "Rollback"


class Hold(Contract):
    timeout: DurationString = "24h"
    on_timeout: HoldTimeout = HoldTimeout.FAIL


class Remedies(Contract):
    max_fallbacks: Annotated[int, Field(ge=0, le=100)] = 2
    max_rollbacks: Annotated[int, Field(ge=0, le=100)] = 1
    hold: Annotated[Hold, Field(default_factory=Hold)]


class Restart(Contract):
    """Budgets; each counts since the last new complete checkpoint."""

    max_failures: Annotated[int, Field(ge=0, le=1000)] = 3
    max_disruptions: Annotated[int, Field(ge=0, le=1000)] = 20


FreeList = Annotated[list[FreeForm], Field(max_length=64)]
StringMap = Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(json_schema_extra={"maxProperties": 64})]


class PodTemplate(Contract):
    """What is laid over the pods the operator builds; the trainer's own settings win."""

    labels: StringMap | None = None
    annotations: StringMap | None = None
    node_selector: StringMap | None = None
    tolerations: FreeList | None = None
    affinity: FreeForm | None = None
    env: FreeList | None = None
    volumes: FreeList | None = None
    volume_mounts: FreeList | None = None
    resources: FreeForm | None = None
    security_context: FreeForm | None = None
    image_pull_secrets: FreeList | None = None
    sidecars: FreeList | None = None
    service_account_name: Annotated[str | None, Field(max_length=253)] = None
    scheduler_name: Annotated[str | None, Field(max_length=253)] = None
    priority_class_name: Annotated[str | None, Field(max_length=253)] = None
    termination_grace_period_seconds: Annotated[int | None, Field(ge=1, le=86_400)] = None


class Spec(Contract):
    image: Annotated[
        str | None, Field(min_length=1, max_length=1024, description="Trainer image; the operator's default if absent.")
    ] = None
    recipe: Recipe
    training: Training
    ladder: Annotated[
        list[Stage],
        Field(
            min_length=1,
            max_length=4,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ]
    compile: Annotated[Compile, Field(default_factory=Compile)]
    gates: Annotated[
        list[Gate],
        Field(
            max_length=32,
            default_factory=list,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ]
    remedies: Annotated[Remedies, Field(default_factory=Remedies)]
    restart: Annotated[Restart, Field(default_factory=Restart)]
    suspend: bool = False
    retry_token: Annotated[
        str, Field(max_length=253, description="Any change re-arms gates and budgets of a Held or Failed job.")
    ] = ""
    active_deadline_seconds: Annotated[
        int | None, Field(ge=1, le=31_536_000, description="Running time of all attempts together.")
    ] = None
    pending_deadline_seconds: Annotated[
        int | None, Field(ge=1, le=31_536_000, description="Longest wait of an attempt for its first step.")
    ] = None
    ttl_seconds_after_finished: Annotated[int | None, Field(ge=0, le=31_536_000)] = None
    template: Annotated[PodTemplate, Field(default_factory=PodTemplate)]
