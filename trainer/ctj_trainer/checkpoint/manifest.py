"""What makes a checkpoint complete: a manifest, written last, with the size and digest of every file."""

import hashlib
import json
from typing import Annotated

from pydantic import Field, ValidationError

from ctj_api.model import Contract
from ctj_api.names import MANIFEST_FILE
from ctj_api.spec import Strategy
from ctj_trainer.checkpoint.storage import AnyPath, size_of, write_whole
from ctj_trainer.loss_scale import LossScaleState

VERSION = 1
_BLOCK_BYTES = 4 * 2**20


class FileRecord(Contract):
    """One file as it was when the checkpoint was committed."""

    bytes: Annotated[int, Field(ge=0)]
    sha256: str


class Manifest(Contract):
    """A committed checkpoint."""

    version: int = VERSION
    step: int
    stage: str
    strategy: Strategy
    world_size: int
    parameters: Annotated[int, Field(description="Elements of all weights.")]
    samples: Annotated[int, Field(description="Position in the endless stream of samples.")]
    finite: Annotated[bool, Field(description="Loss and gradient norm of the step were finite.")]
    loss_scale: LossScaleState | None = None
    files: dict[str, FileRecord]


def read_manifest(folder: AnyPath) -> Manifest | None:
    """Return the manifest of a committed checkpoint, else None (never written, half written, or not ours)."""
    try:
        manifest = Manifest.from_document(json.loads((folder / MANIFEST_FILE).read_text()))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError, ValidationError):
        return None
    return manifest if manifest.version <= VERSION else None


def write_manifest(folder: AnyPath, manifest: Manifest) -> None:
    """Commit: after this the checkpoint exists."""
    write_whole(folder / MANIFEST_FILE, json.dumps(manifest.to_document(), indent=1))


def record_of(path: AnyPath) -> FileRecord:
    """Measure a file."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return FileRecord(bytes=size, sha256=digest.hexdigest())


def damage(folder: AnyPath, name: str, expected: FileRecord) -> str | None:
    """Say what is wrong with a file of a committed checkpoint, or None."""
    path = folder / name
    try:
        size = size_of(path)
        if size != expected.bytes:
            return f"{name} has {size} bytes instead of {expected.bytes}"
        return None if record_of(path).sha256 == expected.sha256 else f"{name} has another sha256 than when written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror or error})"
