"""From a file and `--set` to a document the contract accepts, or to all its problems at once."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ctj_api.validate import load_job, override, validate_document

from ctj_operator.local.refusal import Refusal
from ctj_operator.local.store import JOB_FILE, Store

_OWNED_BY_STORE = ("uid", "generation", "creationTimestamp", "annotations")


def read(file: Path, overrides: Iterable[str]) -> dict[str, Any]:
    """Return the job in `file` (or stored in the folder `file`) with `path=value` settings applied.

    Raises:
        Refusal: unreadable, not one job, or a setting that does not parse.
    """
    try:
        document = _stored(file) if (file / JOB_FILE).exists() else load_job(file)
        for setting in overrides:
            document = override(document, setting)
    except (ValueError, OSError) as error:
        raise Refusal(str(error)) from None
    return document


def admit(document: dict[str, Any], *, stored: dict[str, Any] | None = None) -> None:
    """Check `document`, and against `stored` that it is an allowed change of it.

    Raises:
        Refusal: with every problem.
    """
    problems = validate_document(document, old=stored)
    if not problems:
        return
    lines = [str(problem) for problem in problems]
    if stored is not None:
        lines.append(
            "To start over with the new spec: the same command with --fresh (the old folder is kept under another name)"
        )
    raise Refusal("\n".join(lines))


def _stored(folder: Path) -> dict[str, Any]:
    document = Store(folder).read_job().document
    metadata = {key: value for key, value in document["metadata"].items() if key not in _OWNED_BY_STORE}
    return {**document, "metadata": metadata}
