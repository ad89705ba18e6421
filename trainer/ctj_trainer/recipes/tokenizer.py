"""From text to tokens by a tokenizer file of the user's own; tokenized once per content, then read as a token file.

The `tokenizers` library reads `tokenizer.json` alone: no transformers, no network.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ctj_api.names import ENV_CACHE_DIR
from ctj_trainer.recipe import DataError
from ctj_trainer.recipes.tokens import TokenRow

TOKENIZER_FILE = "tokenizer.json"
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_PIECE_CHARACTERS = 2**20
_VERSION = b"1"  # of how text becomes tokens here; part of a cached file's name


class Tokenizer:
    """A tokenizer file and what a recipe needs of it."""

    def __init__(self, path: Path) -> None:
        self.file = path / TOKENIZER_FILE if path.is_dir() else path
        if not self.file.is_file():
            raise DataError(
                f"config.data.tokenizer is {str(path)!r}: no such file (working folder: {Path.cwd()}); give a "
                f"{TOKENIZER_FILE} or a folder that holds one"
            )
        from tokenizers import Tokenizer as Library

        try:
            self._library = Library.from_file(str(self.file))
        except Exception as error:  # the library raises bare Exceptions
            raise DataError(
                f"config.data.tokenizer is {str(path)!r}: the tokenizers library cannot read it ({error}); "
                f"save it again with save_pretrained or Tokenizer.save"
            ) from error
        self.size = max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def row(self, files: Sequence[Path]) -> TokenRow:
        """Return the files' tokens as one row, tokenized now or before."""
        dtype = "uint16" if self.size <= 2**16 else "uint32"
        target = _cache_folder() / f"{self._key(files)}.{dtype}"
        with _locked(target):  # the ranks of a node wait for the first
            if not target.exists():
                self._write(files, target, np.dtype(dtype))
        return TokenRow([target], dtype=dtype)

    def copy_to(self, folder: Path) -> None:
        """Put the tokenizer beside exported weights, as transformers loads it."""
        shutil.copyfile(self.file, folder / TOKENIZER_FILE)
        for name in _BESIDE:
            if (self.file.parent / name).is_file():
                shutil.copyfile(self.file.parent / name, folder / name)
        config = folder / "tokenizer_config.json"
        if not config.exists():
            config.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}) + "\n")

    def _key(self, files: Sequence[Path]) -> str:
        digest = hashlib.sha256(_VERSION)
        for path in (self.file, *files):
            # Whether lines are documents is told by the name, which is therefore part of the content.
            digest.update(_digest(path) + path.suffix.encode())
        return digest.hexdigest()[:32]

    def _write(self, files: Sequence[Path], target: Path, dtype: np.dtype[Any]) -> None:
        draft = target.with_suffix(".partial")
        try:
            with draft.open("wb") as out:
                for path in files:
                    for ids in self._encoded(path):
                        out.write(np.asarray(ids, dtype=dtype).tobytes())
            draft.replace(target)
        except (UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"config.data.files: {path} cannot be tokenized ({type(error).__name__}: {error}); text must be UTF-8, "
                'and each line of a .jsonl a JSON object with a "text"'
            ) from error
        finally:
            draft.unlink(missing_ok=True)

    def _encoded(self, path: Path) -> Iterator[list[int]]:
        """Each line of a .jsonl is a document, with the special tokens of the tokenizer's own template; any other file
        is one text."""
        is_documents = path.suffix == ".jsonl"
        for text in _documents(path) if is_documents else _pieces(path):
            yield self._library.encode(text, add_special_tokens=is_documents).ids


def _documents(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                text = json.loads(line)["text"]
                if not isinstance(text, str):
                    raise TypeError(f'"text" is {type(text).__name__}')
                yield text


def _pieces(path: Path) -> Iterator[str]:
    """Cut after line ends: a tokenizer need not hold, nor show a bound to, a text of gigabytes."""
    with path.open(encoding="utf-8") as lines:
        while piece := "".join(lines.readlines(_PIECE_CHARACTERS)):
            yield piece


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _cache_folder() -> Path:
    """The node's cache; without one, a folder of this user's."""
    node = os.environ.get(ENV_CACHE_DIR)
    folder = Path(node) / "tokens" if node else Path(tempfile.gettempdir()) / f"ctj-tokens-{os.getuid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written ({error.strerror}): tokens are kept there; free or mount it"
        ) from error
    return folder


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
