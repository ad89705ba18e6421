"""What does the outside ask of this process now: stop, or run eager? Looked at once per optimizer step.

Three ways in: the control file, the supervisor's stop flag, and SIGTERM.
"""

import signal
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ctj_api.control import CompileControl, StopControl
from ctj_trainer.controls import ControlFile
from ctj_trainer.marks import stop_requested


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked, and why; empty: nothing."""

    stop: str = ""
    eager: str = ""
    sequence: int = 0


class Requests:
    """Reads all ways in. Create in the main thread: it takes SIGTERM and SIGINT."""

    def __init__(self, *, attempt: int, control_file: Path | None, run_dir: Path) -> None:
        self._control = ControlFile(control_file, attempt=attempt) if control_file else None
        self._run_dir = run_dir
        self._signal = ""
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGINT, self._note)

    def now(self) -> Request:
        """Return what is asked at this moment."""
        stop = self._signal or stop_requested(self._run_dir) or ""
        if self._control is None:
            return Request(stop=stop)
        control = self._control.read()
        why = control.reason or "asked by control"
        return Request(
            stop=stop or (why if control.stop is StopControl.CHECKPOINT else ""),
            eager=why if control.compile is CompileControl.EAGER else "",
            sequence=control.sequence,
        )

    def _note(self, number: int, _: FrameType | None) -> None:
        self._signal = f"received {signal.Signals(number).name}"
