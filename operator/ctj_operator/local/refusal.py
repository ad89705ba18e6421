"""How anything local says no: one message for the person who must act, and the exit code it means."""

from ctj_api.exit_codes import RunExit


class Refusal(Exception):
    """Printed without a traceback by the command line, which then ends with `exit_code`."""

    exit_code = RunExit.BAD_SPEC

    def __init__(self, message: str, *, exit_code: RunExit | None = None) -> None:
        super().__init__(message)
        if exit_code is not None:
            self.exit_code = exit_code
