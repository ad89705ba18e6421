"""From a file and `--set` to the document that is stored, or to all its problems at once."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ctj_api.spec import Spec
from ctj_api.status import Phase
from ctj_api.validate import SpecError, admit, override, read_job
from ctj_operator.local.refusal import Refusal
from ctj_operator.local.store import JOB_FILE, Store

_ABOUT_RUNNING = {"suspend", "retryToken"}  # said of the moment, not of what is trained
_OWNED_BY_STORE = ("uid", "generation", "creationTimestamp", "annotations")


def read(file: Path, overrides: Iterable[str]) -> dict[str, Any]:
    """Return the job in `file` (or stored in the folder `file`) with `path=value` settings applied, not yet judged.

    Raises:
        Refusal: unreadable, not one job, or a setting that does not parse.
    """
    try:
        return override(_stored(file) if (file / JOB_FILE).exists() else read_job(file), *overrides)
    except SpecError as error:
        raise Refusal(_listed(error)) from None


def admitted(document: dict[str, Any]) -> dict[str, Any]:
    """Return `document` as the API server would store it: valid, defaults filled in.

    Raises:
        Refusal: with every problem.
    """
    return _admitted(document, stored=None)


def admitted_update(document: dict[str, Any], store: Store) -> dict[str, Any]:
    """Return `document` as a change of the stored job. `ctj retry` stands: a file without a token keeps the stored one.

    Raises:
        Refusal: the change is not allowed, or the folder is damaged; nothing was started.
    """
    stored, status = store.read_job(), store.read_status().status
    stored.parsed_spec()
    spec = {"retryToken": stored.spec.get("retryToken", ""), **document["spec"]}
    # The API server keeps the status in the object, and a rule reads it there.
    return _admitted({**document, "spec": spec}, stored={**stored.document, "status": status.to_document()})


def refuse_vain_change(document: dict[str, Any], store: Store) -> None:
    """Refuse another spec for a job that has succeeded: it would train nothing and be shown as if it had.

    Raises:
        Refusal: naming the parts of the spec that differ.
    """
    if store.read_status().status.phase is not Phase.SUCCEEDED:
        return
    before, after = store.read_job().parsed_spec().to_document(), Spec.from_document(document["spec"]).to_document()
    changed = [
        f"spec.{field}" for field in sorted({*before, *after} - _ABOUT_RUNNING) if before.get(field) != after.get(field)
    ]
    if changed:
        raise Refusal(
            f"{store.folder.name} has succeeded and trains no more: the changed {', '.join(changed)} would do nothing. "
            "To train with it: the same command with --fresh (the old folder is kept under another name), or another "
            "metadata.name"
        )


def _admitted(document: dict[str, Any], *, stored: dict[str, Any] | None) -> dict[str, Any]:
    try:
        return admit(document, old=stored)
    except SpecError as error:
        fresh = "\nTo start over with it: the same command with --fresh (the old folder is kept under another name)"
        raise Refusal(_listed(error) + (fresh if stored is not None else "")) from None


def _listed(error: SpecError) -> str:
    """Write one problem on the line of the message, several below it."""
    if len(error.problems) == 1:
        return str(error.problems[0])
    return "\n".join([f"{len(error.problems)} problems", *(f"  {problem}" for problem in error.problems)])


def _stored(folder: Path) -> dict[str, Any]:
    """Return the job of a folder, as if it came from a file: running it again ends a pause."""
    document = Store(folder).read_job().document
    metadata = {key: value for key, value in document["metadata"].items() if key not in _OWNED_BY_STORE}
    return {**document, "metadata": metadata, "spec": {**document["spec"], "suspend": False}}
