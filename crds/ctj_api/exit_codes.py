"""The one table of exit codes: of a trainer pod (set by the supervisor) and of `ctj run`."""

from enum import IntEnum, StrEnum


class Consequence(StrEnum):
    """What the controlling side does about an exit code."""

    DONE = "Done"
    PERMANENT = "Permanent"
    RETRY = "Retry"
    REMEDY = "Remedy"
    STOPPED = "Stopped"


class ExitCode(IntEnum):
    """Exit code of a trainer pod; anything not listed is user code or the image, and permanent."""

    DONE = 0
    USER_CODE_OR_IMAGE = 1
    CONFIGURATION = 10
    USER_CODE = 11
    DATA_OR_STORAGE = 12
    OUT_OF_MEMORY = 13
    NON_FINITE = 14
    PEER_LOST = 15
    HANG = 16
    COMPILE = 17
    KILLED = 137
    STOPPED = 143


_CONSEQUENCES = {
    ExitCode.DONE: Consequence.DONE,
    ExitCode.USER_CODE_OR_IMAGE: Consequence.PERMANENT,
    ExitCode.CONFIGURATION: Consequence.PERMANENT,
    ExitCode.USER_CODE: Consequence.PERMANENT,
    ExitCode.DATA_OR_STORAGE: Consequence.RETRY,
    ExitCode.OUT_OF_MEMORY: Consequence.REMEDY,
    ExitCode.NON_FINITE: Consequence.REMEDY,
    ExitCode.PEER_LOST: Consequence.RETRY,
    ExitCode.HANG: Consequence.RETRY,
    ExitCode.COMPILE: Consequence.PERMANENT,
    ExitCode.KILLED: Consequence.RETRY,  # unless the container's reason is OOMKilled: then OUT_OF_MEMORY
    ExitCode.STOPPED: Consequence.STOPPED,
}

ENDED_WELL = (ExitCode.DONE, ExitCode.STOPPED)
"""Nothing went wrong."""

MEANINGS = {
    ExitCode.DONE: "the stage is done",
    ExitCode.USER_CODE_OR_IMAGE: "user code or the image; also every code that is not in this table",
    ExitCode.CONFIGURATION: "the configuration cannot work",
    ExitCode.USER_CODE: "the recipe's code raised",
    ExitCode.DATA_OR_STORAGE: "data or storage is missing, unreadable or full",
    ExitCode.OUT_OF_MEMORY: "out of memory",
    ExitCode.NON_FINITE: "loss or gradient norm is not finite; nothing was saved",
    ExitCode.PEER_LOST: "a peer is gone or a collective timed out; the cause is on another pod",
    ExitCode.HANG: "no progress; stacks were dumped and the workers stopped",
    ExitCode.COMPILE: "compilation failed where eager is impossible",
    ExitCode.KILLED: "killed; out of memory if the container's reason is OOMKilled",
    ExitCode.STOPPED: "stopped on request; counted only if somebody outside asked and nothing new was saved",
}


def consequence_of(exit_code: int) -> Consequence:
    """Map any exit code of a trainer pod to what must follow."""
    try:
        return _CONSEQUENCES[ExitCode(exit_code)]
    except ValueError:
        return Consequence.PERMANENT


def reason_of(exit_code: int) -> str:
    """Name an exit code as conditions do: OUT_OF_MEMORY is OutOfMemory; what is not listed is UserCodeOrImage."""
    try:
        code = ExitCode(exit_code)
    except ValueError:
        code = ExitCode.USER_CODE_OR_IMAGE
    return "CompileFailed" if code is ExitCode.COMPILE else code.name.title().replace("_", "")


class RunExit(IntEnum):
    """Exit code of `ctj run`."""

    SUCCEEDED = 0
    FAILED = 1
    BAD_SPEC = 2
    HELD = 3
    ENVIRONMENT = 4
    STOPPED = 130


RUN_MEANINGS = {
    RunExit.SUCCEEDED: "the job succeeded",
    RunExit.FAILED: "the job failed",
    RunExit.BAD_SPEC: "bad job file or usage; nothing was started",
    RunExit.HELD: "the job is held; the command that approves it is printed",
    RunExit.ENVIRONMENT: "something is missing here; how to get it is printed",
    RunExit.STOPPED: "stopped by Ctrl-C, with a checkpoint; the same command resumes",
}
