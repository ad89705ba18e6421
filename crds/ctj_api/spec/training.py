"""What is trained, how long and on how much; the same in every stage, so that stages can be compared."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from ctj_api.model import RECIPE_NAME, STORE_URL, Contract, PositiveDecimalString
from ctj_api.spec.shared import FreeForm, Volume


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


class Tracker(StrEnum):
    """Where the figures of each step are written besides the job's own records; through Accelerate's classes."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"


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
