"""What is stored of a local job, and who may write it: a folder that behaves as the API server does.

`job.json` is the document a person owns (spec, annotations); its generation grows when the spec changes. `status.json`
is the runner's memory, written by compare-and-swap on its version. `events.jsonl` is for people. Other commands
(`ctj approve`, `ctj pause`) may edit the document while the runner works: edits are serialized by a lock of their own.
"""

import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ctj_api import names
from ctj_api.attempt import JobIdentity
from ctj_api.exit_codes import RunExit
from ctj_api.spec import Spec
from ctj_api.status import Status
from ctj_operator.core.decision import Event, EventType
from ctj_operator.core.ladder import SpecProblem, read_spec
from ctj_operator.core.reconcile import Conflict
from ctj_operator.local.files import read_json, replace_json
from ctj_operator.local.refusal import Refusal

JOB_FILE = "job.json"
STATUS_FILE = "status.json"
PREVIOUS_STATUS_FILE = "status.json.previous"
EVENTS_FILE = "events.jsonl"


class StoreError(Refusal):
    """The folder does not hold what it should; the message says what to do. Nothing was changed."""

    exit_code = RunExit.ENVIRONMENT


@dataclass(frozen=True, kw_only=True)
class StoredJob:
    """A job's document as stored."""

    document: dict[str, Any]
    path: Path
    """Where it is stored: what a person must correct when it was broken by hand."""

    @property
    def identity(self) -> JobIdentity:
        """Name the job as its trainers know it."""
        metadata = self.document["metadata"]
        return JobIdentity(namespace=metadata.get("namespace", "default"), name=metadata["name"], uid=metadata["uid"])

    @property
    def generation(self) -> int:
        """Count the versions of the spec."""
        return int(self.document["metadata"]["generation"])

    @property
    def annotations(self) -> dict[str, str]:
        """Verbs and whatever else was attached."""
        return dict(self.document["metadata"].get("annotations") or {})

    @property
    def spec(self) -> dict[str, Any]:
        """Return the spec as its owner wrote it."""
        return dict(self.document["spec"])

    def parsed_spec(self) -> Spec:
        """Return the spec as values.

        Raises:
            StoreError: it was broken by hand; one line that names every problem.
        """
        try:
            return read_spec(self.spec)
        except SpecProblem as problem:
            raise StoreError(f"{self.path} was broken by hand: {problem}; correct it there") from None


@dataclass(frozen=True, kw_only=True)
class StoredStatus:
    """The runner's memory and the version it is compared by."""

    version: int
    status: Status


class Store:
    """One job's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def checkpoints(self) -> Path:
        """Root of the job's attempts, checkpoints and export."""
        return self.folder / "checkpoints"

    @property
    def children(self) -> Path:
        """Folders of the attempts' processes: logs, control, termination messages."""
        return self.folder / "children"

    def exists(self) -> bool:
        """Tell whether a job was ever stored here."""
        return (self.folder / JOB_FILE).exists()

    def read_job(self) -> StoredJob:
        """Return the stored document.

        Raises:
            StoreError: there is none, or it is damaged.
        """
        path = self.folder / JOB_FILE
        if not path.exists():
            raise StoreError(f"{self.folder} holds no job (no {JOB_FILE}); `ctj list` shows the jobs there are")
        document = read_json(path)
        try:
            assert document is not None
            job = StoredJob(document=document, path=path)
            _ = job.identity, job.generation, job.spec
        except (AssertionError, KeyError, TypeError, ValueError):
            raise StoreError(
                f"{path} is damaged. Its checkpoints are safe; start over beside it with `ctj run FILE --fresh`"
            ) from None
        return job

    def submit(self, document: dict[str, Any]) -> StoredJob:
        """Store a validated document; a changed spec is a new generation, an equal one changes nothing."""
        with self._editing():
            if not self.exists():
                return self._write_job(_first_version(document))
            stored = self.read_job()
            annotations = {**stored.annotations, **(document["metadata"].get("annotations") or {})}
            metadata = {**stored.document["metadata"], **document["metadata"]}
            if annotations:
                metadata["annotations"] = annotations
            spec = document["spec"]
            if stored.parsed_spec() != Spec.from_document(spec):  # a default written out is no change
                metadata["generation"] = stored.generation + 1
            return self._write_job({**stored.document, "metadata": metadata, "spec": spec})

    def annotate(self, annotation: str, value: str) -> None:
        """Attach `value`; the runner sees it at its next look."""
        with self._editing():
            stored = self.read_job()
            metadata = {**stored.document["metadata"], "annotations": {**stored.annotations, annotation: value}}
            self._write_job({**stored.document, "metadata": metadata})

    def edit_spec(self, **fields: Any) -> None:
        """Set top-level fields of the spec: a new generation if that changes anything."""
        with self._editing():
            stored = self.read_job()
            spec = {**stored.spec, **fields}
            if stored.parsed_spec() == Spec.from_document(spec):
                return
            metadata = {**stored.document["metadata"], "generation": stored.generation + 1}
            self._write_job({**stored.document, "metadata": metadata, "spec": spec})

    def read_status(self) -> StoredStatus:
        """Return the runner's memory; empty and version 0 before its first write.

        Raises:
            StoreError: it is damaged. It is never guessed: an attempt number used twice could mix two trainings.
        """
        path = self.folder / STATUS_FILE
        if not path.exists():
            return StoredStatus(version=0, status=Status())
        try:
            document = json.loads(path.read_text())
            return StoredStatus(version=int(document["version"]), status=Status.from_document(document["status"]))
        except (ValueError, KeyError, TypeError, ValidationError) as error:
            raise StoreError(self._damaged_status(path, error)) from None

    def write_status(self, status: Status, *, over: int) -> StoredStatus:
        """Store `status` if the stored version still is `over`.

        Raises:
            Conflict: it is not.
        """
        path = self.folder / STATUS_FILE
        with self._editing():
            stored = self.read_status()
            if stored.version != over:
                raise Conflict(f"{path} has version {stored.version}, not {over}")
            if path.exists():
                shutil.copyfile(path, self.folder / PREVIOUS_STATUS_FILE)
            replace_json(path, {"version": over + 1, "status": status.to_document()})
        return StoredStatus(version=over + 1, status=status)

    def append_event(self, event: Event, *, at: float) -> None:
        """Add a line for people."""
        line = {"at": at, "type": event.type, "reason": event.reason, "message": event.message}
        with (self.folder / EVENTS_FILE).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def read_events(self) -> list[dict[str, Any]]:
        """Return every event, oldest first; torn and foreign lines are left out."""
        try:
            lines = (self.folder / EVENTS_FILE).read_text().splitlines()
        except FileNotFoundError:
            return []
        return [event for line in lines if (event := _parse_line(line)) is not None]

    def move_aside(self) -> Path:
        """Keep the folder under another name, and make room for a fresh job; nothing is deleted."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        aside = self.folder.with_name(f"{self.folder.name}.{stamp}")
        number = 1
        while aside.exists():
            aside = self.folder.with_name(f"{self.folder.name}.{stamp}-{number}")
            number += 1
        self.folder.rename(aside)
        return aside

    @contextmanager
    def _editing(self) -> Iterator[None]:
        """Serialize read-then-write over processes."""
        descriptor = os.open(self.folder / ".edit", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _write_job(self, document: dict[str, Any]) -> StoredJob:
        path = self.folder / JOB_FILE
        replace_json(path, document)
        return StoredJob(document=document, path=path)

    def _damaged_status(self, path: Path, error: Exception) -> str:
        previous = self.folder / PREVIOUS_STATUS_FILE
        first_line = str(error).splitlines()[0]
        restore = f"restore the version before it with `mv {previous} {path}`, or " if previous.exists() else ""
        return (
            f"{path} is damaged ({first_line}). Checkpoints and job are untouched: {restore}"
            "start over with `ctj run FILE --fresh`, which keeps this folder under another name"
        )


def _first_version(document: dict[str, Any]) -> dict[str, Any]:
    metadata = {
        **document["metadata"],
        "uid": str(uuid.uuid4()),
        "generation": 1,
        "creationTimestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": metadata, "spec": document["spec"]}


def _parse_line(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    known = isinstance(event, dict) and event.get("type") in list(EventType) and {"reason", "message"} <= event.keys()
    return event if known else None
