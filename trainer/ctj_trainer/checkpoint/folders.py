"""Where checkpoints lie, which of them this attempt may use, and which may be deleted. No torch, no collectives."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ctj_api.attempt import LineageEntry
from ctj_api.names import MANIFEST_FILE, attempt_folder, step_folder
from ctj_api.report import CheckpointRef
from ctj_trainer.checkpoint.errors import FencedError
from ctj_trainer.checkpoint.manifest import Manifest, read_manifest
from ctj_trainer.checkpoint.storage import AnyPath, remove_tree, write_whole

FENCE = "fence"


@dataclass(frozen=True, kw_only=True)
class Committed:
    """A checkpoint with a manifest; its files are not verified yet."""

    ref: CheckpointRef
    folder: AnyPath
    manifest: Manifest


def folder_of(root: AnyPath, ref: CheckpointRef) -> AnyPath:
    """Folder of one checkpoint."""
    return root / attempt_folder(ref.attempt) / step_folder(ref.step)


def committed_in(root: AnyPath, attempt: int) -> list[Committed]:
    """Checkpoints of one attempt, oldest first."""
    found = []
    folders: list[AnyPath] = [*(root / attempt_folder(attempt)).glob("step-*")]
    for folder in sorted(folders, key=str):
        manifest = read_manifest(folder)
        if manifest is not None:
            ref = CheckpointRef(attempt=attempt, step=manifest.step)
            found.append(Committed(ref=ref, folder=folder, manifest=manifest))
    return found


def usable(root: AnyPath, attempt: int, lineage: Sequence[LineageEntry]) -> list[Committed]:
    """What this attempt may continue from, newest first: its own checkpoints, and its lineage's up to their limits.

    Own ones exist where a cluster starts the same attempt again. Nothing else in the root is looked at: a partitioned
    older attempt may still write there.
    """
    found = committed_in(root, attempt)
    for entry in lineage:
        if entry.attempt != attempt:
            found += [c for c in committed_in(root, entry.attempt) if c.ref.step <= entry.max_step]
    return sorted(found, key=lambda c: (c.ref.step, c.ref.attempt), reverse=True)


def superseded(
    newest_first: Sequence[Committed], *, stage: str, keep: int, pinned: Iterable[CheckpointRef]
) -> list[Committed]:
    """Choose what to delete: all but the newest `keep` of this stage, the pinned ones and the last finite one.

    Other stages' checkpoints are where a rollback goes; each stage has trimmed its own.
    """
    held = set(pinned)
    of_stage = [c for c in newest_first if c.manifest.stage == stage]
    last_finite = next((c for c in of_stage if c.manifest.finite), None)
    return [c for c in of_stage[keep:] if c.ref not in held and c is not last_finite]


def delete(checkpoint: Committed) -> None:
    """Delete, manifest first: an interrupted deletion must not look complete."""
    (checkpoint.folder / MANIFEST_FILE).unlink(missing_ok=True)
    remove_tree(checkpoint.folder, ignore_errors=True)


def raise_fence(root: AnyPath, attempt: int) -> None:
    """Announce this attempt: older ones will not commit any more.

    Raises:
        FencedError: a newer attempt has announced itself already.
    """
    check_fence(root, attempt)
    root.mkdir(parents=True, exist_ok=True)
    write_whole(root / FENCE, f"{attempt}\n")


def check_fence(root: AnyPath, attempt: int) -> None:
    """Make sure that no newer attempt has started.

    Raises:
        FencedError: one has.
    """
    try:
        highest = int((root / FENCE).read_text())
    except (FileNotFoundError, ValueError):
        return
    if highest > attempt:
        raise FencedError(
            f"attempt {attempt} does not commit its checkpoint: attempt {highest} of this job has started "
            f"({root / FENCE}); this pod was cut off or is left over; it ends without writing"
        )
