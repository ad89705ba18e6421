"""Checkpoints of one attempt: saved by all ranks, found again by lineage, portable between the four strategies."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from ctj_api.attempt import Attempt
from ctj_api.report import CheckpointRef
from ctj_trainer.checkpoint.errors import (
    FencedError,
    MismatchError,
    MissingRanksError,
    NoCheckpointError,
    StorageError,
)
from ctj_trainer.checkpoint.folders import Committed, delete, raise_fence, superseded, usable
from ctj_trainer.checkpoint.loading import newest_sound, read_into
from ctj_trainer.checkpoint.saving import Description, write_checkpoint
from ctj_trainer.checkpoint.site import Site
from ctj_trainer.checkpoint.storage import root_of
from ctj_trainer.checkpoint.together import from_first
from ctj_trainer.strategies.prepared import Prepared

__all__ = [
    "Checkpoints",
    "Committed",
    "Description",
    "FencedError",
    "MismatchError",
    "MissingRanksError",
    "NoCheckpointError",
    "StorageError",
]


@dataclass(frozen=True, kw_only=True)
class Checkpoints(Site):
    """The verbs on a checkpoint root; every one of them is collective over `group`."""

    @classmethod
    def of(
        cls, attempt: Attempt, *, volume: Path, group: dist.ProcessGroup, notice: Callable[[str], None]
    ) -> "Checkpoints":
        """Read what an attempt message says about checkpoints; its own `saveAt` steps are kept like pinned ones."""
        pinned = {CheckpointRef(attempt=entry.attempt, step=entry.max_step) for entry in attempt.pinned}
        pinned |= {CheckpointRef(attempt=attempt.attempt, step=step) for step in attempt.window.save_at}
        return cls(
            root=root_of(attempt, volume),
            attempt=attempt.attempt,
            lineage=attempt.lineage,
            floor_step=attempt.floor_step,
            keep=attempt.training.checkpoint.keep,
            pinned=frozenset(pinned),
            group=group,
            notice=notice,
        )

    def claim(self) -> None:
        """Raise the fence at start, so that older attempts stop committing.

        Raises:
            FencedError: a newer attempt has started.
            StorageError: the root cannot be written.
        """
        from_first(self.group, self._claim)

    def load(self, prepared: Prepared) -> Committed | None:
        """Restore the newest sound checkpoint of the lineage; None: there is none, and none is needed.

        Raises:
            NoCheckpointError: nothing sound is new enough.
            MismatchError: the checkpoint is of another model.
        """
        chosen = newest_sound(self)
        if chosen is not None:
            read_into(prepared, chosen, group=self.group)
        return chosen

    def save(self, prepared: Prepared, description: Description) -> CheckpointRef:
        """Write, commit, then delete what is superseded.

        Raises:
            MissingRanksError: a rank did not come.
            FencedError: a newer attempt has started.
            StorageError: the folder cannot be written, or what was written is incomplete.
        """
        ref = write_checkpoint(prepared, description, self)
        if dist.get_rank(self.group) == 0:
            self._trim(description.stage)
        return ref

    def _claim(self) -> None:
        try:
            raise_fence(self.root, self.attempt)
        except OSError as error:
            raise StorageError(
                f"{self.root} cannot be written ({error.strerror or error}); mount the checkpoint volume writable"
            ) from error

    def _trim(self, stage: str) -> None:
        try:
            known = usable(self.root, self.attempt, self.lineage)
            for old in superseded(known, stage=stage, keep=self.keep, pinned=self.pinned):
                delete(old)
        except OSError as error:  # the new checkpoint is safe: too many old ones are no reason to stop
            self.notice(f"old checkpoints below {self.root} could not be deleted ({error}); free the space by hand")
