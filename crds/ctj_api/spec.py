"""What a person may ask for: the typed `spec` of a CompiledTrainingJob.

Field constraints here become the CRD's schema (`schema.py`); rules over several fields are CEL, in `rules.py`.
Descriptions are what `kubectl explain` prints.
"""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from ctj_api.model import (
    PROFILE_NAME,
    RECIPE_NAME,
    STORE_URL,
    Contract,
    DecimalString,
    DnsLabel,
    DurationString,
    PositiveDecimalString,
)
from ctj_api.names import GRACE_SECONDS

FreeForm = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]
BY_NAME = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
YEAR_SECONDS = 31_536_000


class Strategy(StrEnum):
    """How parameters and gradients are laid out over processes, in ladder order."""

    SINGLE = "single"
    DDP = "ddp"
    FSDP = "fsdp"
    ZERO3 = "zero3"


class Precision(StrEnum):
    """Type of parameters and activations in forward and backward; optimizer state is always fp32.

    fp16 scales its loss: a step whose gradients overflow is skipped, and the scale halved."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class ActivationCheckpointing(StrEnum):
    """Which activations are computed again in the backward pass instead of being kept."""

    NONE = "None"
    BLOCKS = "Blocks"


class Offload(StrEnum):
    """What lies in the host's memory between its uses, instead of in the accelerator's."""

    NONE = "None"
    PARAMETERS = "Parameters"
    PARAMETERS_AND_OPTIMIZER = "ParametersAndOptimizer"


class Tracker(StrEnum):
    """Where the figures of each step are written besides the job's own records; through Accelerate's classes."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"


class CompileScope(StrEnum):
    """What is compiled: each repeated block in place (regional), the whole model (full), or nothing (disabled)."""

    REGIONAL = "regional"
    FULL = "full"
    DISABLED = "disabled"


class Keep(StrEnum):
    """When the compiled form is kept after a stage's comparison with eager: if correct and faster, or if correct."""

    IF_FASTER = "IfFaster"
    IF_CORRECT = "IfCorrect"


class Dynamic(StrEnum):
    """Shapes in compiled code: what was seen to change (Auto), never (Static), or all from the start (Dynamic)."""

    AUTO = "Auto"
    STATIC = "Static"
    DYNAMIC = "Dynamic"


class Fallback(StrEnum):
    """What follows when compiled code fails, storms or is not equal to eager: the stage goes on in eager mode, or the
    attempt fails."""

    EAGER = "Eager"
    FAIL = "Fail"


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


class Volume(Contract):
    """A PersistentVolumeClaim; ctj run keeps everything below its work folder instead."""

    claim_name: Annotated[
        str, Field(min_length=1, max_length=253, description="Name of a claim in the job's namespace.")
    ]


class Recipe(Contract):
    """What is trained: model, data and loss."""

    name: Annotated[
        str,
        Field(
            min_length=1,
            max_length=253,
            pattern=RECIPE_NAME,
            description="Built-in recipe (causal_lm), or module:function of your own. Cannot change.",
        ),
    ]
    config: Annotated[FreeForm, Field(default_factory=dict, description="Owned and checked by the recipe.")]


class Optimizer(Contract):
    """AdamW, with linear warm-up and then a cosine down to a share of the peak rate."""

    learning_rate: Annotated[PositiveDecimalString, Field(description="Peak rate, more than 0.")] = "3e-4"
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000, description="Steps from rate 0 to the peak.")] = 0
    weight_decay: Annotated[PositiveDecimalString, Field(description="Decoupled decay, of matrices only.")] = "0.1"
    minimum_rate: Annotated[
        PositiveDecimalString, Field(description="End of the cosine, as a share of learningRate.")
    ] = "0.1"
    gradient_clip: Annotated[
        PositiveDecimalString, Field(description="Limit of the global gradient norm; 0 turns it off.")
    ] = "1.0"


class CheckpointPolicy(Contract):
    """When state is saved; a stage also saves at its end, and before the steps that the next stage repeats."""

    every_steps: Annotated[int, Field(ge=1, le=1_000_000, description="Optimizer steps between checkpoints.")] = 100
    keep: Annotated[
        int, Field(ge=1, le=100, description="Newest checkpoints kept; those needed to go back come on top.")
    ] = 3
    volume: Annotated[
        Volume | None, Field(description="Where checkpoints live; must be reachable from every node.")
    ] = None
    url: Annotated[
        str | None,
        Field(
            pattern=STORE_URL,
            max_length=1024,
            description="A store that fsspec knows, as in s3://bucket/checkpoints, for the checkpoints themselves; "
            "records and reports stay on the volume. Cannot change.",
        ),
    ] = None


class Evaluation(Contract):
    """The loss on samples that are never trained on, in eager mode and without dropout; also at each stage's end."""

    every_steps: Annotated[int, Field(ge=1, le=1_000_000, description="Optimizer steps between evaluations.")]
    steps: Annotated[
        int, Field(ge=1, le=100_000, description="Global batches of each evaluation, always the same ones.")
    ] = 10
    share: Annotated[
        PositiveDecimalString,
        Field(
            description="Share of the samples held out, the last ones; not used where the recipe brings evaluation "
            "samples of its own. Cannot change."
        ),
    ] = "0.05"


class Training(Contract):
    """How long and on how much; the same in every stage, so that stages can be compared."""

    steps: Annotated[int, Field(ge=1, le=100_000_000, description="Optimizer steps of the whole ladder.")]
    global_batch_size: Annotated[
        int, Field(ge=1, le=1_000_000, description="Sequences per optimizer step, in every stage. Cannot change.")
    ]
    micro_batch_size: Annotated[int, Field(ge=1, le=65_536, description="Sequences per process and forward.")]
    precision: Precision = Precision.FP32
    seed: Annotated[
        int, Field(ge=0, le=2**31 - 1, description="Of initial weights, data order and dropout. Cannot change.")
    ] = 0
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE
    optimizer: Annotated[Optimizer, Field(default_factory=Optimizer)]
    checkpoint: Annotated[CheckpointPolicy, Field(default_factory=CheckpointPolicy)]
    evaluation: Evaluation | None = None
    trackers: Annotated[
        list[Tracker],
        Field(
            max_length=3, default_factory=list, description="Written by the first process; all attempts are one run."
        ),
    ]


class Stage(Contract):
    """One rung: a strategy on so many processes, for so many steps."""

    name: Annotated[DnsLabel, Field(max_length=20, description="Part of the name of every Job of this stage.")]
    strategy: Strategy
    steps: Annotated[
        int | None,
        Field(ge=1, le=100_000_000, description="Canary window; absent in the last stage, which runs to the end."),
    ] = None
    nodes: Annotated[int, Field(ge=1, le=1000, description="Pods, one on each node.")] = 1
    gpus_per_node: Annotated[int | None, Field(ge=1, le=64, description="GPUs of each pod, one process for each.")] = (
        None
    )
    processes_per_node: Annotated[
        int | None, Field(ge=1, le=64, description="Processes of each pod where no GPU is asked for; 1 if absent.")
    ] = None
    offload: Offload = Offload.NONE
    replay_steps: Annotated[
        int | None,
        Field(
            ge=0,
            le=1000,
            description="Last steps that the next stage repeats and compares; min(5, steps / 4) if absent.",
        ),
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
    """Relative differences that count as equal; where absent, what the precision allows."""

    probe_loss: Annotated[
        PositiveDecimalString | None, Field(description="Compiled and eager loss on one batch from equal state.")
    ] = None
    probe_grad_norm: Annotated[PositiveDecimalString | None, Field(description="The same, of the gradient norm.")] = (
        None
    )
    window_loss: Annotated[
        PositiveDecimalString | None, Field(description="Loss of each repeated step, this stage and the one before.")
    ] = None
    window_grad_norm: Annotated[PositiveDecimalString | None, Field(description="The same, of the gradient norm.")] = (
        None
    )


class CompileCache(Contract):
    """Where compiled code is kept between pods, beside the node's own folder."""

    volume: Volume


Dims = Annotated[list[Annotated[int, Field(ge=0, le=15)]], Field(min_length=1, max_length=8)]
Sizes = Annotated[list[Annotated[int, Field(ge=1, le=2**31 - 1)]], Field(min_length=1, max_length=16)]
AT_MOST_16 = {"maxProperties": 16}


class Compile(Contract):
    """How the model is compiled; when it cannot be, or does not pay, training goes on in eager mode.

    What is absent here is settled where the trainer runs: by ACCELERATE_DYNAMO_* in its environment, else by the
    hardware profile, else as each description says. The result is in the log and beside the attempt's checkpoints.
    """

    scope: Annotated[CompileScope | None, Field(description=f"{CompileScope.__doc__} regional if absent.")] = None
    backend: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=64,
            description="A backend of the installed torch, in any case; no for none; inductor if absent.",
        ),
    ] = None
    profile: Annotated[
        str,
        Field(
            max_length=64,
            pattern=PROFILE_NAME,
            description="Hardware profile: default, published or none; default/h100 takes that device's. "
            "mode, options and what else is set here go over it.",
        ),
    ] = "default"
    mode: Annotated[
        str | None, Field(min_length=1, max_length=64, description="A mode of torch.compile; instead of options.")
    ] = None
    options: Annotated[FreeForm | None, Field(description="Options of inductor; instead of mode.")] = None
    dynamic: Annotated[Dynamic | None, Field(description=f"{Dynamic.__doc__} Auto if absent.")] = None
    dynamic_dims: Annotated[
        dict[str, Dims] | None,
        Field(
            json_schema_extra=AT_MOST_16,
            description="Dimensions whose length changes, by name of the batch's tensor, as in tokens: [1]; compiled "
            "for every length at once.",
        ),
    ] = None
    shapes: Annotated[
        list[Annotated[dict[str, Sizes], Field(json_schema_extra=AT_MOST_16)]] | None,
        Field(max_length=16, description="Shapes to warm up on, each by name of the batch's tensor."),
    ] = None
    fullgraph: Annotated[
        bool | None,
        Field(description="Asks for no graph break: each is counted, and a gate on graphBreaks may act. Else false."),
    ] = None
    recompile_limit: Annotated[
        int, Field(ge=1, le=1024, description="After this many recompilations a region runs eager.")
    ] = 8
    keep: Keep = Keep.IF_FASTER
    min_speedup: Annotated[
        PositiveDecimalString, Field(description="Eager step time / compiled step time that IfFaster asks for.")
    ] = "1.03"
    fallback: Fallback = Fallback.EAGER
    tolerances: Annotated[Tolerances, Field(default_factory=Tolerances)]
    timeout_seconds: Annotated[int, Field(ge=1, le=86_400, description="Longest wait for a rank that compiles.")] = 1800
    cache: CompileCache | None = None


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


FreeList = Annotated[list[FreeForm], Field(max_length=64)]
StringMap = Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(json_schema_extra={"maxProperties": 64})]


class PodTemplate(Contract):
    """What is laid over the pods the operator builds, in the words of a pod; the trainer's own settings win."""

    labels: Annotated[StringMap | None, Field(description="Added to Job and pods.")] = None
    annotations: Annotated[StringMap | None, Field(description="Added to the pods.")] = None
    node_selector: Annotated[StringMap | None, Field(description="Labels that a node must have.")] = None
    tolerations: Annotated[FreeList | None, Field(description="Taints that are tolerated.")] = None
    affinity: Annotated[FreeForm | None, Field(description="Affinity of the pods.")] = None
    env: Annotated[FreeList | None, Field(description="Environment of the trainer.")] = None
    volumes: Annotated[FreeList | None, Field(description="Volumes of the pod.")] = None
    volume_mounts: Annotated[FreeList | None, Field(description="Mounts of the trainer.")] = None
    resources: Annotated[FreeForm | None, Field(description="Requests and limits of the trainer; GPUs are added.")] = (
        None
    )
    security_context: Annotated[FreeForm | None, Field(description="Security context of the pod.")] = None
    image_pull_secrets: Annotated[FreeList | None, Field(description="Secrets for pulling images.")] = None
    sidecars: Annotated[FreeList | None, Field(description="Containers beside the trainer.")] = None
    service_account_name: Annotated[str | None, Field(max_length=253, description="Account of the pods.")] = None
    scheduler_name: Annotated[str | None, Field(max_length=253, description="Scheduler of the pods.")] = None
    priority_class_name: Annotated[str | None, Field(max_length=253, description="Priority class of the pods.")] = None
    termination_grace_period_seconds: Annotated[
        int | None, Field(ge=1, le=86_400, description="Time to save a checkpoint when a pod is told to stop.")
    ] = None

    @property
    def grace_seconds(self) -> int:
        """Seconds from a polite stop to a kill."""
        return self.termination_grace_period_seconds or GRACE_SECONDS


class Spec(Contract):
    """What is wanted."""

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
            json_schema_extra=BY_NAME,
            description="Stages, in the order single, ddp, fsdp, zero3. Names and strategies cannot change.",
        ),
    ]
    compile: Annotated[Compile, Field(default_factory=Compile)]
    gates: Annotated[
        list[Gate],
        Field(
            max_length=32,
            default_factory=list,
            json_schema_extra=BY_NAME,
            description="Gates besides the default ones.",
        ),
    ]
    remedies: Annotated[Remedies, Field(default_factory=Remedies)]
    restart: Annotated[Restart, Field(default_factory=Restart)]
    suspend: Annotated[
        bool, Field(description="Save a checkpoint, stop, and free the GPUs until this is false again.")
    ] = False
    retry_token: Annotated[
        str, Field(max_length=253, description="Any change re-arms gates and budgets of a Held or Failed job.")
    ] = ""
    active_deadline_seconds: Annotated[
        int | None, Field(ge=1, le=YEAR_SECONDS, description="Running time of all attempts together.")
    ] = None
    pending_deadline_seconds: Annotated[
        int | None, Field(ge=1, le=YEAR_SECONDS, description="Longest wait of an attempt for its first step.")
    ] = None
    ttl_seconds_after_finished: Annotated[
        int | None,
        Field(ge=0, le=YEAR_SECONDS, description="The job is deleted this long after its end; kept if absent."),
    ] = None
    template: Annotated[PodTemplate, Field(default_factory=PodTemplate)]
