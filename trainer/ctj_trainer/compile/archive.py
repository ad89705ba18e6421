"""How does compiled code travel to another node? As one file beside the checkpoints, loaded only by a digest that came
another way: compiled code is code, and a file that vouches for itself proves nothing. No torch.
"""

import hashlib
import os
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ctj_api.attempt import CacheArchive
from ctj_api.names import CACHE_FOLDER

MOST_BYTES = 256 * 2**20
"""Newest files first up to here: a small model's code has 1 MB, and what is left out is compiled again."""
_CHUNK = 2**20
_MOST_FILES = 20_000


class ArchiveError(RuntimeError):
    """The archive was not used; the message says why and what it costs."""


def publish(folder: Path, root: Path, *, key: str, most_bytes: int = MOST_BYTES) -> CacheArchive | None:
    """Pack `folder` into one file below `root`; None where there is nothing. Equal content gives an equal digest.

    Raises:
        OSError: the root cannot be written, or is full.
    """
    paths = _newest(folder, most_bytes)
    if not paths:
        return None
    target = root / CACHE_FOLDER
    target.mkdir(parents=True, exist_ok=True)
    draft = target / f".{os.getpid()}.tmp"
    try:
        with tarfile.open(draft, "w") as archive:
            for path in paths:
                _add(archive, path, folder)
        digest = _digest(draft)
        num_bytes = draft.stat().st_size
        draft.replace(target / f"{digest}.tar")
    finally:
        draft.unlink(missing_ok=True)
    return CacheArchive(key=key, digest=digest, num_bytes=num_bytes)


def forget_others(root: Path, keep: CacheArchive) -> None:
    """Delete the archives that `keep` replaced."""
    for path in (root / CACHE_FOLDER).glob("*.tar"):
        if path.stem != keep.digest:
            path.unlink(missing_ok=True)


def fetch_once(archive: CacheArchive, root: Path, folder: Path) -> int:
    """Fetch an archive unless this folder has had it; returns the number of files.

    Raises:
        ArchiveError: as `fetch`.
    """
    mark = folder / f".fetched-{archive.digest}"
    if mark.exists():
        return 0
    count = fetch(archive, root, folder)
    with suppress(OSError):
        mark.touch()
    return count


def fetch(archive: CacheArchive, root: Path, folder: Path) -> int:
    """Unpack an archive over `folder`; returns the number of files. What was verified replaces what lies there.

    Raises:
        ArchiveError: it is missing, cut or changed, or there is no room; nothing of it was loaded.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as scratch:
            ours = Path(scratch) / "archive.tar"
            # Verified is the copy, which nobody but us can change between the check and the use.
            found = _copy(root / CACHE_FOLDER / f"{archive.digest}.tar", ours, most_bytes=archive.num_bytes)
            if found != archive.digest:
                raise ArchiveError(
                    f"the archive of compiled code has digest {found[:12]}, expected {archive.digest[:12]}: it was cut "
                    "or changed; it is not used, and everything is compiled again"
                )
            with tarfile.open(ours) as content:
                content.extractall(Path(scratch) / "new", filter="data")
            return _move_over(Path(scratch) / "new", folder)
    except (OSError, tarfile.TarError) as error:
        raise ArchiveError(f"the archive of compiled code cannot be used ({error}): compiled again") from error


def _newest(folder: Path, most_bytes: int) -> list[Path]:
    """Files that fit, newest first; without other processes' drafts and locks. In the order of their names."""
    found = sorted(((path.stat().st_mtime, path) for path in _files(folder)), reverse=True)
    chosen, total = [], 0
    for _, path in found[:_MOST_FILES]:
        total += path.stat().st_size
        if total > most_bytes:
            break
        chosen.append(path)
    return sorted(chosen)


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        inside = path.relative_to(folder).parts
        is_draft = any(part.startswith(".") or part.endswith((".lock", ".tmp")) or part == "locks" for part in inside)
        if not is_draft and path.is_file() and not path.is_symlink():
            yield path


def _add(archive: tarfile.TarFile, path: Path, folder: Path) -> None:
    entry = tarfile.TarInfo(path.relative_to(folder).as_posix())  # no owner and no time: equal content, equal digest
    with path.open("rb") as content:
        status = os.fstat(content.fileno())
        entry.size, entry.mode = status.st_size, 0o755 if status.st_mode & 0o100 else 0o644
        archive.addfile(entry, content)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy(source: Path, target: Path, *, most_bytes: int) -> str:
    """Copy at most `most_bytes` and one more chunk; returns the digest of what was copied."""
    digest, total = hashlib.sha256(), 0
    with source.open("rb") as file, target.open("wb") as copy:
        while (chunk := file.read(_CHUNK)) and total <= most_bytes:
            total += len(chunk)
            digest.update(chunk)
            copy.write(chunk)
    return digest.hexdigest()


def _move_over(source: Path, folder: Path) -> int:
    count = 0
    for path in _files(source):
        target = folder / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)  # a rename: a library that is in use stays whole for its user
        os.utime(target)
        count += 1
    return count
