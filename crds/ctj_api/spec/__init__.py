"""What a person may ask for: the typed `spec` of a CompiledTrainingJob.

Field constraints here become the CRD's schema (`schema.py`); rules over several fields are CEL, in `rules.py`.
Descriptions are what `kubectl explain` prints.
"""

from typing import Annotated

from pydantic import Field

from ctj_api.model import Contract
from ctj_api.spec.compile import Compile, CompileCache, CompileScope, Dynamic, Fallback, Keep, Tolerances
from ctj_api.spec.gates import (
    Gate,
    GateMode,
    GateSource,
    Hold,
    HoldTimeout,
    Measurement,
    OnFailure,
    Remedies,
    Restart,
    ThresholdRange,
)
from ctj_api.spec.ladder import Offload, Stage, Strategy
from ctj_api.spec.pods import PodTemplate
from ctj_api.spec.shared import BY_NAME, YEAR_SECONDS, Volume
from ctj_api.spec.training import (
    ActivationCheckpointing,
    CheckpointPolicy,
    Evaluation,
    Optimizer,
    Precision,
    Recipe,
    Tracker,
    Training,
)

__all__ = [
    "ActivationCheckpointing",
    "CheckpointPolicy",
    "Compile",
    "CompileCache",
    "CompileScope",
    "Dynamic",
    "Evaluation",
    "Fallback",
    "Gate",
    "GateMode",
    "GateSource",
    "Hold",
    "HoldTimeout",
    "Keep",
    "Measurement",
    "Offload",
    "OnFailure",
    "Optimizer",
    "PodTemplate",
    "Precision",
    "Recipe",
    "Remedies",
    "Restart",
    "Spec",
    "Stage",
    "Strategy",
    "ThresholdRange",
    "Tolerances",
    "Tracker",
    "Training",
    "Volume",
]


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
