"""What does the deciding side want of this attempt right now? A level in a file, not a queue. No torch."""

from pathlib import Path

from ctj_api.control import Control


class ControlFile:
    """Reads the control state; cheap enough for every step (one `stat` while nothing changes)."""

    def __init__(self, path: Path, *, attempt: int) -> None:
        self._path = path
        self._attempt = attempt
        self._seen: tuple[int, int, int] | None = None
        self._newest = Control(attempt=attempt, sequence=0)

    def read(self) -> Control:
        """Return the newest state of this attempt. Older sequences, other attempts, half-written and absent files
        change nothing."""
        try:
            # By path each time: Kubernetes replaces the folder behind it, so that an open file would stay old for ever.
            status = self._path.stat()
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
            if seen != self._seen:
                control = Control.model_validate_json(self._path.read_text())
                self._seen = seen
                if control.attempt == self._attempt and control.sequence > self._newest.sequence:
                    self._newest = control
        except (OSError, ValueError):
            pass
        return self._newest
