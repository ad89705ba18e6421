"""What the deciding side tells one attempt: the only thing a trainer knows about its job.

Travels as JSON in `CTJ_ATTEMPT`. The trainer picks its checkpoint from `lineage` at start, so a re-admitted Job with an
old environment still resumes from the newest step.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from ctj_api.model import Contract
from ctj_api.spec import Compile, Recipe, Stage, Training

MESSAGE_VERSION = 1
"""A trainer accepts this version and the one before; anything else ends with exit code 10 and one line."""


class Mode(StrEnum):
    """How the model's regions run."""

    COMPILED = "Compiled"
    EAGER = "Eager"


class LineageEntry(Contract):
    """Checkpoints of one earlier attempt that this attempt may continue from."""

    attempt: Annotated[int, Field(ge=1)]
    max_step: Annotated[int, Field(ge=0, description="Later checkpoints of that attempt are not ours.")]


class Replay(Contract):
    """Steps this stage repeats on the same samples, and where the previous stage's record of them lies."""

    attempt: Annotated[int, Field(ge=1, description="Attempt whose end-of-stage record is the reference.")]
    from_step: Annotated[int, Field(ge=0, description="Last step before the window.")]
    to_step: Annotated[int, Field(ge=1, description="Last step of the window.")]


class StageWindow(Contract):
    """Optimizer steps of a stage; step s is the state after s optimizer steps."""

    start_step: Annotated[int, Field(ge=0, description="State the stage starts from (before its replay).")]
    end_step: Annotated[int, Field(ge=1, description="The stage ends after this step.")]
    save_at: Annotated[tuple[int, ...], Field(description="Steps saved in any case: end - replay, and end.")]


class JobIdentity(Contract):
    """Which job this is; the uid tells it from an earlier one of the same name."""

    namespace: str
    name: str
    uid: str


class CacheArchive(Contract):
    """Compiled code that an attempt left beside its checkpoints, as CACHE_FOLDER/<digest>.tar.

    Code is loaded only by a digest that came another way than the file: in the report, the status and this message.
    """

    key: Annotated[str, Field(max_length=256, description="Torch, Python and hardware it was compiled with and for.")]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the file.")]
    num_bytes: Annotated[int, Field(ge=1)]


class Attempt(Contract):
    """Everything one attempt is told."""

    version: int = MESSAGE_VERSION
    job: JobIdentity
    attempt: Annotated[int, Field(ge=1)]
    stage: Stage
    window: StageWindow
    ladder: Annotated[
        list[Stage],
        Field(description="Every stage: its memory, packages and threads are seen to from the first attempt on."),
    ]
    floor_step: Annotated[
        int, Field(ge=0, description="Without a checkpoint at least this new the attempt fails (12).")
    ]
    lineage: Annotated[list[LineageEntry], Field(default_factory=list)]
    replay: Replay | None = None
    mode: Annotated[Mode, Field(description="Eager: do not compile, and do not compare.")]
    retry_compile: Annotated[
        bool, Field(description="Measure again; a stored verdict of this stage is not reused.")
    ] = False
    micro_batch_size: Annotated[int, Field(ge=1, description="May be smaller than the spec's after out-of-memory.")]
    pinned: Annotated[list[LineageEntry], Field(default_factory=list, description="Checkpoints retention must keep.")]
    recipe: Recipe
    training: Training
    compile: Compile
    compile_cache: Annotated[
        CacheArchive | None, Field(description="Compiled code of an earlier attempt, fetched where its key fits.")
    ] = None

    @property
    def is_last(self) -> bool:
        """Whether the job is done when this attempt is: in the ladder's last stage, or in one that was gone back to."""
        return self.window.end_step >= self.training.steps
