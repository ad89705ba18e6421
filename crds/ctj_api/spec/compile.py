"""How is the model compiled, and when is the compiled form kept?"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from ctj_api.model import PROFILE_NAME, Contract, PositiveDecimalString
from ctj_api.spec.shared import FreeForm, Volume


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
