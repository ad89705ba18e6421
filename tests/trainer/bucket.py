"""An object store as fsspec sees one, on a local folder: no append, listings are cached until somebody asks anew."""

from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Bucket(LocalFileSystem):
    protocol = "bucket"

    def _open(self, path: str, mode: str = "rb", **keywords: Any) -> Any:
        assert "a" not in mode, "object stores cannot append"
        return super()._open(path, mode, **keywords)

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(LocalFileSystem._strip_protocol(str(path).removeprefix("bucket://")))


def register() -> None:
    fsspec.register_implementation("bucket", Bucket, clobber=True)


def url_of(folder: Path) -> str:
    return f"bucket://{folder}"
