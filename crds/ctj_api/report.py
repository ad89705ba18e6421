"""What an attempt tells back when it ends, and while it runs.

`Report` is the termination message (at most 4 KiB) and, with the per-step record beside it, `report.json` in the
attempt's folder. `Progress` is what the supervisor publishes while training runs.
"""

from typing import Annotated

from pydantic import Field

from ctj_api.attempt import MESSAGE_VERSION, CacheArchive, Mode
from ctj_api.model import Contract
from ctj_api.spec import Measurement

MAX_TERMINATION_BYTES = 4096
MAX_NOTICES = 8


class CheckpointRef(Contract):
    """A complete checkpoint: the attempt that made it, and its step."""

    attempt: Annotated[int, Field(ge=1)]
    step: Annotated[int, Field(ge=0)]


class CompileVerdict(Contract):
    """Compiled or eager, decided once per stage by the trainer and kept with the attempt's checkpoints."""

    mode: Mode
    reason: Annotated[
        str, Field(max_length=512, description="Correct and 1.21x faster; probe loss differs by ...; ...")
    ]
    fault: Annotated[
        str | None, Field(max_length=32, description="Class of the trouble that made it eager: shape, toolchain, ...")
    ] = None
    eager_from_step: Annotated[int | None, Field(ge=0, description="First step it took effect in.")] = None
    eager_regions: Annotated[
        str, Field(max_length=512, description="Regions that run eager while the others are compiled, and why.")
    ] = ""
    probe_loss_relative: float | None = None
    probe_grad_norm_relative: float | None = None
    eager_step_seconds: float | None = None
    compiled_step_seconds: float | None = None
    speedup: float | None = None
    break_even_steps: float | None = None
    first_compiled_seconds: Annotated[
        float | None, Field(description="First compiled forward and backward, compilation included.")
    ] = None


class Failure(Contract):
    """First cause of a failed attempt."""

    rank: int | None = None
    reason: Annotated[str, Field(max_length=64, description="UserCode, OutOfMemory, PeerLost, ...")]
    message: Annotated[str, Field(max_length=1024)]
    last_lines: Annotated[str, Field(max_length=1500)] = ""


class MemoryPrediction(Contract):
    """Peak memory of a stage, predicted before anything is allocated."""

    stage: str
    predicted_bytes: Annotated[int, Field(ge=0, description="Peak of one process.")]
    limit_bytes: Annotated[int | None, Field(ge=0)] = None


class Report(Contract):
    """What an attempt achieved, measured and decided."""

    version: int = MESSAGE_VERSION
    attempt: Annotated[int, Field(ge=1)]
    stage: str
    exit_code: int
    mode: Mode = Mode.EAGER
    start_step: Annotated[int, Field(ge=0, description="Step the attempt resumed from.")] = 0
    step: Annotated[int, Field(ge=0, description="Last finished optimizer step.")] = 0
    checkpoint: CheckpointRef | None = None
    measurements: Annotated[dict[Measurement, float], Field(default_factory=dict)]
    compile: CompileVerdict | None = None
    compile_cache: Annotated[
        CacheArchive | None, Field(description="Compiled code that this attempt published, or went on using.")
    ] = None
    memory: Annotated[list[MemoryPrediction], Field(default_factory=list)]
    failure: Failure | None = None
    notices: Annotated[
        list[str],
        Field(default_factory=list, max_length=MAX_NOTICES, description="Loud fallbacks: what, and the cure."),
    ]


class Progress(Contract):
    """State of a running pod, written by its supervisor; rank 0's numbers."""

    attempt: Annotated[int, Field(ge=1)]
    step: Annotated[int, Field(ge=0)]
    phase: Annotated[
        str, Field(description="Starting, Loading, Compiling, Probing, Training, Evaluating, Saving, Exporting, Done.")
    ]
    mode: Mode
    loss: float | None = None
    grad_norm: float | None = None
    step_seconds: float | None = None
    recompiles: int = 0
    graphs: int = 0
    compile_seconds: float = 0.0
    memory_used_bytes: int | None = None
    memory_limit_bytes: int | None = None
    control_sequence: Annotated[int, Field(description="Newest control state that every rank has acted on.")] = 0
    checkpoint_step: Annotated[int | None, Field(description="Newest complete checkpoint of this attempt.")] = None
    updated_at: Annotated[float, Field(description="Seconds since the epoch, of this pod's clock.")]
