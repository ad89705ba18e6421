"""Find the newest checkpoint that is complete and undamaged, and read it into whatever strategy runs now."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from ctj_trainer.checkpoint.errors import MismatchError, NoCheckpointError, StorageError
from ctj_trainer.checkpoint.folders import Committed, usable
from ctj_trainer.checkpoint.manifest import damage
from ctj_trainer.checkpoint.site import Site
from ctj_trainer.checkpoint.storage import reader_of
from ctj_trainer.checkpoint.together import from_first
from ctj_trainer.strategies.prepared import Prepared


def newest_sound(site: Site) -> Committed | None:
    """Choose the checkpoint to continue from; None means a fresh start. Collective; every rank gets the same answer.

    Raises:
        NoCheckpointError: nothing sound is as new as `floor_step`.
        StorageError: the root cannot be read.
    """
    candidates = from_first(site.group, lambda: _readable(site))
    for candidate in candidates:
        if candidate.ref.step < site.floor_step:
            break
        problems = _problems(candidate, site.group)
        if not problems:
            return candidate
        if dist.get_rank(site.group) == 0:
            site.notice(
                f"checkpoint {candidate.folder} is damaged and not used: {'; '.join(problems)}; trying an older one"
            )
    if site.floor_step > 0:
        raise NoCheckpointError(
            f"{site.root}: no complete checkpoint at or after step {site.floor_step} in attempts "
            f"{', '.join(str(entry.attempt) for entry in site.lineage) or 'none'}; is it the volume the job wrote to?"
        )
    return None


def read_into(prepared: Prepared, checkpoint: Committed, *, group: dist.ProcessGroup) -> None:
    """Restore model, optimizer and loss scale. Collective.

    Raises:
        MismatchError: the checkpoint is of another model.
    """

    def read(tensors: dict[str, Tensor]) -> None:
        try:
            dcp_load(tensors, storage_reader=reader_of(checkpoint.folder), process_group=group)
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            kind = StorageError if isinstance(cause, OSError) else MismatchError
            raise kind(
                f"checkpoint {checkpoint.folder} does not fit the model (rank {rank}: {cause}); "
                "the recipe's model must stay the same for the life of a job; start a new job for a new model"
            ) from error

    prepared.load_state(read)
    if prepared.loss_scale is not None and checkpoint.manifest.loss_scale is not None:
        prepared.loss_scale.state = checkpoint.manifest.loss_scale


def _readable(site: Site) -> list[Committed]:
    try:
        return usable(site.root, site.attempt, site.lineage)
    except OSError as error:
        raise StorageError(
            f"{site.root} cannot be read ({error.strerror or error}); check that the volume is mounted"
        ) from error


def _problems(candidate: Committed, group: dist.ProcessGroup) -> list[str]:
    """Verify size and digest of every file, each rank its share."""
    names = sorted(candidate.manifest.files)[dist.get_rank(group) :: dist.get_world_size(group)]
    found = [damage(candidate.folder, name, candidate.manifest.files[name]) for name in names]
    parts: list[list[str | None]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(parts, found, group=group)
    return [problem for part in parts for problem in part if problem is not None]
