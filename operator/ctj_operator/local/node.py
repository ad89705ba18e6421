"""Where one node of an attempt keeps its files, and what they say."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from ctj_api.names import PROGRESS_FILE
from ctj_api.report import Progress, Report
from ctj_operator.local.files import read_json


@dataclass(frozen=True, kw_only=True)
class NodeFolder:
    """Files of one node of one child."""

    path: Path

    @property
    def log(self) -> Path:
        """Output of the supervisor and everything below it."""
        return self.path / "log"

    @property
    def run(self) -> Path:
        """Scratch of the trainer: progress, marks."""
        return self.path / "run"

    @property
    def control(self) -> Path:
        """State the supervisor follows."""
        return self.path / "control.json"

    @property
    def termination(self) -> Path:
        """Report of the supervisor."""
        return self.path / "termination.json"

    @property
    def process(self) -> Path:
        """Pid and start time, for people and for `logs`."""
        return self.path / "process.json"

    @property
    def exit(self) -> Path:
        """Exit code, once there is one."""
        return self.path / "exit.json"

    def progress(self) -> Progress | None:
        """Read what the trainer last said of itself."""
        document = read_json(self.run / PROGRESS_FILE)
        try:
            return None if document is None else Progress.from_document(document)
        except ValidationError:
            return None

    def report(self) -> Report | None:
        """Read the termination message."""
        document = read_json(self.termination)
        try:
            return None if document is None else Report.from_document(document)
        except ValidationError:
            return None


def node_folder(children: Path, child: str, index: int) -> NodeFolder:
    """Return the folder of node `index` of `child`."""
    return NodeFolder(path=children / child / f"node-{index}")
