"""What the deciding side tells a running attempt: a level, not a queue; the newest sequence wins."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from ctj_api.model import Contract


class CompileControl(StrEnum):
    """Whether compiled code may be used."""

    AUTO = "Auto"
    EAGER = "Eager"


class StopControl(StrEnum):
    """Whether to stop, and how."""

    NONE = "None"
    CHECKPOINT = "Checkpoint"


class Control(Contract):
    """The wanted state of a running attempt."""

    attempt: Annotated[int, Field(ge=1)]
    sequence: Annotated[int, Field(ge=0)]
    compile: CompileControl = CompileControl.AUTO
    stop: StopControl = StopControl.NONE
    reason: Annotated[str, Field(max_length=1024)] = ""
