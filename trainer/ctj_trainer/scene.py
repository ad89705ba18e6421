"""Where does a stage run, whom does it tell, and which attempts does it continue?"""

import dataclasses
import logging
from dataclasses import dataclass, field
from pathlib import Path

from ctj_api.attempt import Attempt
from ctj_api.names import attempt_folder
from ctj_api.report import MAX_NOTICES
from ctj_trainer.compile.policy import CompilePolicy
from ctj_trainer.ranks import Ranks
from ctj_trainer.requests import Requests
from ctj_trainer.telemetry import Telemetry

log = logging.getLogger("ctj")


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Where a stage runs and what it tells."""

    attempt: Attempt
    root: Path
    run_dir: Path
    ranks: Ranks
    telemetry: Telemetry
    requests: Requests
    notices: list[str] = field(default_factory=list)

    def notice(self, text: str) -> None:
        """Say it once, in the log and in the report."""
        if text not in self.notices and len(self.notices) < MAX_NOTICES:
            self.notices.append(text)
            log.info("notice: %s", text)

    def settled(self, policy: CompilePolicy) -> "Scene":
        """Return the scene of an attempt whose compile settings leave nothing open."""
        settings = policy.as_settings(self.attempt.compile)
        return dataclasses.replace(self, attempt=self.attempt.model_copy(update={"compile": settings}))

    @property
    def folder(self) -> Path:
        """This attempt's folder."""
        return self.root / attempt_folder(self.attempt.attempt)

    @property
    def ancestry(self) -> list[Path]:
        """Folders of the attempts this one continues, oldest first, its own last."""
        numbers = [entry.attempt for entry in self.attempt.lineage if entry.attempt != self.attempt.attempt]
        return [self.root / attempt_folder(number) for number in [*numbers, self.attempt.attempt]]
