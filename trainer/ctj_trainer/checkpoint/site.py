"""What one attempt knows about the checkpoint root: where, which lineage, what to keep, and who takes part."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from ctj_api.attempt import LineageEntry
from ctj_api.report import CheckpointRef
from ctj_trainer.checkpoint.storage import AnyPath

ARRIVAL_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Site:
    """The checkpoint root as one attempt sees it."""

    root: AnyPath
    attempt: int
    lineage: Sequence[LineageEntry]
    floor_step: int
    """Nothing older is good enough."""
    keep: int
    pinned: frozenset[CheckpointRef]
    group: dist.ProcessGroup
    """A gloo group of all ranks."""
    notice: Callable[[str], None]
    """Told, on rank 0, of whatever was repaired or passed over."""
    arrival_timeout_seconds: float = ARRIVAL_TIMEOUT_SECONDS
