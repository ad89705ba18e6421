"""How a file of a job's folder is replaced: readers see the old text or the new one, never half of it."""

import json
import os
from pathlib import Path
from typing import Any


def replace_text(path: Path, text: str) -> None:
    """Write `text` beside `path` and move it there: on disk before it is visible, so a power cut keeps one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def replace_json(path: Path, document: dict[str, Any]) -> None:
    """Like `replace_text`, for a document a person may want to read."""
    replace_text(path, json.dumps(document, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the document in `path`; None when it is absent or not (yet) one."""
    try:
        document = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    return document if isinstance(document, dict) else None
