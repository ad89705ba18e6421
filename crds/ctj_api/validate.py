"""Does the API server take this job? Every problem of a document at once, without a cluster.

The generated CRD is the one source of truth: its schema, its defaults and its CEL rules are run here in the order in
which the API server runs them. `tests/contract` compares both on one table of documents.
"""

import copy
import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from ctj_api import names
from ctj_api.checks.fields import drop_nulls, drop_unknown_fields, fill_defaults
from ctj_api.checks.metadata import identity_problems, metadata_problems
from ctj_api.checks.problem import MISSING, Problem, SpecError, show
from ctj_api.override import override
from ctj_api.spec import Spec

__all__ = ["Problem", "SpecError", "load_job", "override", "validate_document"]

# etcd takes 1.5 MiB in one request; the API server adds its own bookkeeping to what is sent.
_MAX_BYTES = 1_500_000


def validate_document(document: str | dict[str, Any], *, old: dict[str, Any] | None = None) -> list[Problem]:
    """Return every problem of a job, given as YAML text (one or several documents) or as one parsed document.

    With `old`, the stored document, also what an update must not change.
    """
    if isinstance(document, dict):
        return _admit(document, old=old)[1]
    try:
        documents = read_job_documents(document)
    except SpecError as error:
        return error.problems
    problems = [_admit(each, old=old)[1] for each in documents]
    if len(problems) == 1:
        return problems[0]
    return [_within(index, problem) for index, each in enumerate(problems, start=1) for problem in each]


def read_job_documents(text: str) -> list[Any]:
    """Return the documents of a YAML text; at least one.

    Raises:
        SpecError: not YAML, or nothing in it.
    """
    from ctj_api.checks.yaml_text import read_documents

    documents = read_documents(text)
    if not documents:
        raise SpecError([_empty("the file")])
    return documents


def load_job(path: Path | str, *, overrides: list[str] | None = None) -> tuple[dict[str, Any], Spec]:
    """Return metadata and spec of the one job in a file, with `path=value` overrides and all defaults applied.

    Raises:
        SpecError: the file cannot be read or holds no valid job; names every problem.
    """
    document = admit(override(read_job(path), *(overrides or [])))
    return document["metadata"], Spec.from_document(document["spec"])


def read_job(path: Path | str) -> dict[str, Any]:
    """Return the one document of a file as it is written, not validated.

    Raises:
        SpecError: the file cannot be read or is not one YAML map.
    """
    documents = read_job_documents(read_text(path))
    if len(documents) > 1:
        found = f"{len(documents)} documents"
        raise SpecError(
            [
                Problem(
                    path=str(path),
                    value=found,
                    rule="must be one job to be run",
                    remedy="split it, or kubectl apply it",
                )
            ]
        )
    if not isinstance(documents[0], dict):
        raise SpecError([_not_a_map(documents[0])])
    return documents[0]


def read_text(path: Path | str) -> str:
    """Return the text of a job file; `-` is what is piped in. Of one that is too large only the beginning is read.

    Raises:
        SpecError: it cannot be read, is too large, or is not text.
    """
    from ctj_api.checks.yaml_text import MAX_FILE_BYTES, too_large

    try:
        with open(sys.stdin.fileno() if str(path) == "-" else path, "rb", closefd=str(path) != "-") as file:
            size = os.fstat(file.fileno()).st_size  # 0 where it is not known: a pipe, a device
            data = b"" if size > MAX_FILE_BYTES else file.read(MAX_FILE_BYTES + 1)
        if max(size, len(data)) > MAX_FILE_BYTES:
            raise SpecError([too_large(str(path), size)])
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        problem = Problem(
            path=str(path), value=f"unreadable ({reason})", rule="a job file must be YAML text", remedy="check the path"
        )
        raise SpecError([problem]) from None


def admit(document: dict[str, Any], *, old: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the document as the API server would store it: defaults filled in.

    Raises:
        SpecError: it would be refused; names every problem.
    """
    admitted, problems = _admit(document, old=old)
    if problems:
        raise SpecError(problems)
    return admitted


@cache
def _schema() -> dict[str, Any]:
    from ctj_api.crd import job_schema

    return job_schema()


def _admit(document: Any, *, old: dict[str, Any] | None) -> tuple[dict[str, Any], list[Problem]]:
    # Imported late: jsonschema and cel-python take a second, and come with the extra `operator` only.
    from ctj_api.checks.cel import rule_problems
    from ctj_api.checks.values import drop_unreadable, value_problems

    if not isinstance(document, dict):
        return {}, [_not_a_map(document)]
    admitted, schema = copy.deepcopy(document), _schema()
    problems = identity_problems(admitted)
    if "kind" in admitted and admitted["kind"] != names.KIND:
        return admitted, problems  # of another kind: nothing else we say would help
    problems += metadata_problems(admitted, is_new=old is None)
    metadata = admitted.pop("metadata")
    problems += drop_unknown_fields(admitted, schema)
    admitted.pop("status", None)  # a subresource: what is sent with the job is ignored
    admitted["metadata"] = metadata
    _complete(admitted)
    judged = {key: value for key, value in admitted.items() if key == "spec"}
    problems += value_problems(judged, schema)
    stored = _completed(old) if old is not None else None
    if stored is not None and "status" in stored:
        admitted["status"] = stored["status"]
    said = {problem.path for problem in problems}
    readable = admitted
    if problems:
        readable = copy.deepcopy(admitted)
        drop_unreadable(readable, schema)
    broken = rule_problems(readable, old=stored, complete=not problems)
    problems += [problem for problem in broken if problem.path not in said]
    return admitted, [*problems, *_size_problems(document)]


def _complete(document: dict[str, Any]) -> None:
    drop_nulls(document, _schema())
    fill_defaults(document, _schema())


def _completed(document: dict[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(document)
    _complete(result)
    return result


def _size_problems(document: dict[str, Any]) -> list[Problem]:
    size = len(json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode())
    if size <= _MAX_BYTES:
        return []
    return [
        Problem(
            path="the document",
            value=f"{size} bytes",
            rule=f"must be at most {_MAX_BYTES} bytes, all that a cluster stores",
            remedy="keep large things in files and name their paths",
        )
    ]


def _within(index: int, problem: Problem) -> Problem:
    return Problem(
        path=f"document {index}: {problem.path}", value=problem.value, rule=problem.rule, remedy=problem.remedy
    )


def _empty(path: str) -> Problem:
    return Problem(
        path=path, value=MISSING, rule=f"must hold a {names.KIND}", remedy="start from examples/quickstart.yaml"
    )


def _not_a_map(value: Any) -> Problem:
    return Problem(
        path="the document",
        value=show(value),
        rule=f"must be a map with apiVersion: {names.API_VERSION} and kind: {names.KIND}",
        remedy="start from examples/quickstart.yaml",
    )
