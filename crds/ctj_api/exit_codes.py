"""The one table of exit codes: of a trainer pod (set by the supervisor) and of `ctj run`."""

from enum import IntEnum, StrEnum


class Outcome(StrEnum):
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


_OUTCOMES = {
    ExitCode.DONE: Outcome.DONE,
    ExitCode.USER_CODE_OR_IMAGE: Outcome.PERMANENT,
    ExitCode.CONFIGURATION: Outcome.PERMANENT,
    ExitCode.USER_CODE: Outcome.PERMANENT,
    ExitCode.DATA_OR_STORAGE: Outcome.RETRY,
    ExitCode.OUT_OF_MEMORY: Outcome.REMEDY,
    ExitCode.NON_FINITE: Outcome.REMEDY,
    ExitCode.PEER_LOST: Outcome.RETRY,
    ExitCode.HANG: Outcome.RETRY,
    ExitCode.COMPILE: Outcome.PERMANENT,
    ExitCode.KILLED: Outcome.RETRY,  # unless the container's reason is OOMKilled: then OUT_OF_MEMORY
    ExitCode.STOPPED: Outcome.STOPPED,
}


def outcome_of(exit_code: int) -> Outcome:
    """Map any exit code of a trainer pod to what must follow."""
    try:
        return _OUTCOMES[ExitCode(exit_code)]
    except ValueError:
        return Outcome.PERMANENT


class RunExit(IntEnum):
    """Exit code of `ctj run`."""

    SUCCEEDED = 0
    FAILED = 1
    BAD_SPEC = 2
    HELD = 3
    ENVIRONMENT = 4
    STOPPED = 130
