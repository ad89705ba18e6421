"""Write one checkpoint: all ranks, into the attempt's own folder, committed by the manifest. Older ones stay."""

import errno
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ctj_api.report import CheckpointRef
from ctj_api.spec import Strategy
from ctj_trainer.checkpoint.errors import StorageError
from ctj_trainer.checkpoint.folders import check_fence, folder_of
from ctj_trainer.checkpoint.manifest import FileRecord, Manifest, read_manifest, record_of, write_manifest
from ctj_trainer.checkpoint.site import Site
from ctj_trainer.checkpoint.storage import AnyPath, reader_of, remove_tree, writer_to
from ctj_trainer.checkpoint.together import await_all, from_first, on_every_rank
from ctj_trainer.strategies.prepared import Prepared

MINIMUM_SHARE = 0.99  # of the model's elements; less means that ranks did not take part


@dataclass(frozen=True, kw_only=True)
class Description:
    """What the manifest says beside the files."""

    step: int
    stage: str
    strategy: Strategy
    samples: int
    finite: bool


def write_checkpoint(prepared: Prepared, description: Description, site: Site) -> CheckpointRef:
    """Write and commit. Collective over the site's group.

    Raises:
        MissingRanksError: a rank did not come.
        FencedError: a newer attempt has started.
        StorageError: the folder cannot be written, or what was written is incomplete.
    """
    group = site.group
    ref = CheckpointRef(attempt=site.attempt, step=description.step)
    folder = folder_of(site.root, ref)
    what = f"checkpoint of step {ref.step} (attempt {site.attempt})"
    await_all(group, what, timeout_seconds=site.arrival_timeout_seconds)
    if from_first(group, lambda: _clear(folder, site)):
        return ref
    try:
        _write_tensors(prepared.state(), folder, group)
        files = _measure(folder, group)
        manifest = Manifest(
            step=ref.step,
            stage=description.stage,
            strategy=description.strategy,
            world_size=dist.get_world_size(group),
            parameters=prepared.num_elements,
            samples=description.samples,
            finite=description.finite,
            loss_scale=prepared.loss_scale.state if prepared.loss_scale else None,
            files=files,
        )
        from_first(group, lambda: _commit(folder, manifest, site))
    except StorageError:
        if dist.get_rank(group) == 0:  # a full disk must not stay full of a checkpoint that nobody can use
            remove_tree(folder, ignore_errors=True)
        raise
    return ref


def _clear(folder: AnyPath, site: Site) -> bool:
    """Make room; True if this very checkpoint is there already."""
    check_fence(site.root, site.attempt)
    if read_manifest(folder) is not None:
        return True
    try:
        if folder.exists():
            site.notice(f"replacing {folder}: an earlier save was interrupted before it was complete")
            remove_tree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        raise _storage_error(folder, error) from error
    return False


def _write_tensors(state: dict[str, Tensor], folder: AnyPath, group: dist.ProcessGroup) -> None:
    try:
        dcp_save(state, storage_writer=writer_to(folder), process_group=group)
    except CheckpointException as error:
        # The same exception on every rank: who failed, and why.
        rank, (cause, _) = next(iter(error.failures.items()))
        raise _storage_error(folder, cause, rank=rank) from error


def _measure(folder: AnyPath, group: dist.ProcessGroup) -> dict[str, FileRecord]:
    """Digest what each rank has written, each its own files."""
    rank = dist.get_rank(group)
    own: dict[str, FileRecord] = {}
    with on_every_rank(group, "reading back the checkpoint"):
        paths = [*folder.glob(f"__{rank}_*.distcp"), *(folder.glob(".metadata") if rank == 0 else ())]
        own = {path.name: record_of(path) for path in paths}
    parts: list[dict[str, FileRecord]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(parts, own, group=group)
    return dict(sorted((name, record) for part in parts for name, record in part.items()))


def _commit(folder: AnyPath, manifest: Manifest, site: Site) -> None:
    written = elements_in(folder)
    if written < MINIMUM_SHARE * manifest.parameters:
        raise StorageError(
            f"{folder} holds {written} of the model's {manifest.parameters} elements; not committed, older checkpoints "
            "are kept; every rank must save its part"
        )
    check_fence(site.root, site.attempt)
    try:
        write_manifest(folder, manifest)
    except OSError as error:
        raise _storage_error(folder, error) from error


def elements_in(folder: AnyPath) -> int:
    """Count the elements of all weights that really lie in a checkpoint's files."""
    metadata = reader_of(folder).read_metadata()
    return sum(
        chunk.sizes.numel()
        for name, tensor in metadata.state_dict_metadata.items()
        if name.startswith("model.") and isinstance(tensor, TensorStorageMetadata)
        for chunk in tensor.chunks
    )


def _storage_error(folder: AnyPath, cause: BaseException, *, rank: int | None = None) -> StorageError:
    where = "" if rank is None else f" on rank {rank}"
    remedies = {
        errno.ENOSPC: "the volume is full; free space, enlarge it or lower spec.training.checkpoint.keep",
        errno.EDQUOT: "the quota is used up; free space or lower spec.training.checkpoint.keep",
        errno.EROFS: "the volume is read-only; mount it writable",
        errno.EACCES: "the process may not write there; fix the folder's owner or mode (fsGroup in a cluster)",
        errno.EPERM: "the process may not write there; fix the folder's owner or mode (fsGroup in a cluster)",
    }
    number = cause.errno if isinstance(cause, OSError) else None
    remedy = remedies.get(number or 0, "check the volume; the newest complete checkpoint is intact")
    return StorageError(f"writing checkpoint {folder} failed{where}: {type(cause).__name__}: {cause}; {remedy}")
