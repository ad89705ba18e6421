"""Where checkpoints lie: a folder of a mounted volume, or one behind a URL that fsspec knows (s3://, gs://, file://).

`UrlPath` has the verbs of `pathlib.Path` that checkpoints use, so that everything else is one code for both. Nothing
is appended and no folder is renamed: object stores can do neither.
"""

import io
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from ctj_api.attempt import Attempt


@dataclass(frozen=True)
class UrlPath:
    """A file or folder behind a URL. Holds nothing but text, so that ranks can send it to each other."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "UrlPath":
        return UrlPath(f"{self.url.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    def glob(self, pattern: str) -> "list[UrlPath]":
        """Children that match, as the store has them now."""
        files, path = self._open_store()
        files.invalidate_cache()
        return [self / str(found).rstrip("/").rpartition("/")[2] for found in files.glob(f"{path}/{pattern}")]

    def exists(self) -> bool:
        """Whether there is such a file or folder."""
        files, path = self._open_store()
        files.invalidate_cache()
        return bool(files.exists(path))

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Make a folder, where the store knows folders at all."""
        del parents, exist_ok  # always both
        files, path = self._open_store()
        files.makedirs(path, exist_ok=True)

    def open(self, mode: str) -> BinaryIO:
        """Open for reading."""
        files, path = self._open_store()
        return cast(BinaryIO, files.open(path, mode))

    def read_text(self) -> str:
        """Read a whole file."""
        with self.open("rb") as file, io.TextIOWrapper(file, encoding="utf-8") as text:
            return text.read()

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Remove a file."""
        files, path = self._open_store()
        try:
            files.rm(path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def _open_store(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs

        files, path = url_to_fs(self.url)  # fsspec keeps one client for each store
        return files, str(path)


AnyPath = Path | UrlPath


def root_of(attempt: Attempt, volume: Path) -> AnyPath:
    """Return the folder of a job's checkpoints: below the spec's URL one for each job, else on the volume."""
    url, job = attempt.training.checkpoint.url, attempt.job
    return volume if url is None else UrlPath(url.rstrip("/")) / job.namespace / f"{job.name}-{job.uid}"


def write_whole(path: AnyPath, text: str) -> None:
    """Write a file that is there completely or not at all, also after a crash."""
    if isinstance(path, UrlPath):
        files, name = path._open_store()
        files.pipe_file(name, text.encode())  # one object: stores show it when it is complete
        return
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def size_of(path: AnyPath) -> int:
    """Bytes of a file."""
    if isinstance(path, Path):
        return path.stat().st_size
    files, name = path._open_store()
    files.invalidate_cache()
    return int(files.size(name))


def remove_tree(folder: AnyPath, *, ignore_errors: bool = False) -> None:
    """Remove a folder with all that is in it."""
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=ignore_errors)
        return
    files, name = folder._open_store()
    try:
        files.rm(name, recursive=True)
    except OSError:
        if not ignore_errors:
            raise


def writer_to(folder: AnyPath) -> FileSystemWriter:
    """Return what torch writes a checkpoint with."""
    if isinstance(folder, Path):
        return FileSystemWriter(folder)
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecWriter

    return FsspecWriter(folder.url)


def reader_of(folder: AnyPath) -> FileSystemReader:
    """Return what torch reads a checkpoint with."""
    if isinstance(folder, Path):
        return FileSystemReader(folder)
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader

    return FsspecReader(folder.url)
