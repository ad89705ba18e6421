"""Text and token files as one long row of tokens, cut into samples of equal length. Nothing is read before its use."""

import sysconfig
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctj_trainer.recipe import DataError
from ctj_trainer.recipes.paths import matching

BUILT_IN_BYTES = 8 * 2**20  # of the standard library: plenty for a demonstration, read in 10 ms
BYTE_VOCABULARY = 256


class TokenSamples:
    """Sample i holds the tokens [i * L, i * L + L]: L inputs and, shifted by one, L targets."""

    def __init__(self, row: "TokenRow", *, sequence_length: int, vocabulary_size: int) -> None:
        self._row = row
        self._length = sequence_length
        self._vocabulary_size = vocabulary_size
        if len(row) <= sequence_length:
            raise DataError(
                f"config.data holds {len(row)} tokens ({row.describe()}); "
                f"sequenceLength {sequence_length} needs {sequence_length + 1}; add files or shorten the sequence"
            )

    def __len__(self) -> int:
        return (len(self._row) - 1) // self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one sample."""
        first = index * self._length
        tokens = self._row.read(first, first + self._length + 1)
        if tokens.max() >= self._vocabulary_size:
            raise DataError(
                f"config.data: token {int(tokens.max())} in sample {index} ({self._row.path_at(first)}); the model's "
                f"vocabulary has {self._vocabulary_size}; set model.vocabularySize or check data.dtype"
            )
        return {"tokens": torch.from_numpy(tokens)}


class TokenRow:
    """Several files as one row of tokens, mapped into memory on first use."""

    def __init__(self, paths: Sequence[Path], *, dtype: str, max_tokens: int | None = None) -> None:
        self._paths = list(paths)
        self._dtype = np.dtype(dtype)
        sizes = [_size(path, item_bytes=self._dtype.itemsize) for path in self._paths]
        self._ends = list(accumulate(sizes))
        self._total = self._ends[-1] if max_tokens is None else min(self._ends[-1], max_tokens)
        self._maps: dict[int, NDArray[np.unsignedinteger]] = {}

    def __len__(self) -> int:
        return self._total

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens [start, stop), across file ends where they lie so."""
        out = np.empty(stop - start, dtype=np.int64)
        at = start
        while at < stop:
            file = bisect_right(self._ends, at)
            file_start = self._ends[file - 1] if file else 0
            until = min(stop, self._ends[file])
            out[at - start : until - start] = self._map(file)[at - file_start : until - file_start]
            at = until
        return out

    def path_at(self, position: int) -> Path:
        """File that holds a position."""
        return self._paths[bisect_right(self._ends, position)]

    def describe(self) -> str:
        """Name the files for an error message."""
        shown = ", ".join(str(path) for path in self._paths[:3])
        return shown if len(self._paths) <= 3 else f"{shown} and {len(self._paths) - 3} more"

    def _map(self, file: int) -> NDArray[np.unsignedinteger]:
        if file not in self._maps:
            self._maps[file] = np.memmap(self._paths[file], dtype=self._dtype, mode="r")
        return self._maps[file]


def find_files(patterns: Sequence[str]) -> list[Path]:
    """Expand patterns to files, in sorted order, so that every process sees the same row.

    Raises:
        DataError: a pattern matches nothing.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        matches = matching(pattern)
        if not matches:
            raise DataError(
                f"config.data.files: no file matches {pattern!r} (working folder: {Path.cwd()}); "
                "check the path, and that the volume is mounted in every pod"
            )
        found.update(dict.fromkeys(matches))
    return list(found)


def standard_library() -> TokenRow:
    """The Python standard library's own sources as text: always there, the same for every process of one image."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = sorted(path for path in folder.glob("*.py") if path.stat().st_size)
    if not sources:
        raise DataError(
            f"config.data.builtin is 'python-stdlib': {folder} holds no sources; use data.files with text of your own"
        )
    return TokenRow(sources, dtype="uint8", max_tokens=BUILT_IN_BYTES)


def _size(path: Path, *, item_bytes: int) -> int:
    size = path.stat().st_size
    if size % item_bytes or not size:
        raise DataError(
            f"config.data.files: {path} has {size} bytes; it must hold one or more tokens of {item_bytes} bytes; "
            "check data.dtype, and that the file was copied completely"
        )
    return size // item_bytes
