"""Which fields exist, and what stands in those that were left out: strict decoding and defaulting of the API server."""

import copy
import difflib
from typing import Any

from ctj_api.checks.problem import Problem, child_path
from ctj_api.schema import PRESERVE

Schema = dict[str, Any]


def drop_unknown_fields(value: Any, schema: Schema, path: str = "") -> list[Problem]:
    """Remove fields that the schema does not have, in place, and return one problem for each."""
    if isinstance(value, list):
        items = schema.get("items", {PRESERVE: True})
        return [
            problem
            for index, item in enumerate(value)
            for problem in drop_unknown_fields(item, items, child_path(path, index))
        ]
    if not isinstance(value, dict) or PRESERVE in schema or schema.get("type") != "object":
        return []
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    problems = []
    for name in list(value):
        below = known.get(name, others)
        if below is None:
            problems.append(_unknown_field(child_path(path, name), name, list(known)))
            del value[name]
        else:
            problems += drop_unknown_fields(value[name], below, child_path(path, name))
    return problems


def _unknown_field(path: str, name: str, known: list[str]) -> Problem:
    lowered = {field.lower(): field for field in known}
    nearest = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return Problem(
        path=path,
        value="not a known field",
        rule=f"must be one of {', '.join(sorted(known))}" if known else "must not be set",
        remedy=f"did you mean {lowered[nearest[0]]}?" if nearest else "remove it",
    )


def drop_nulls(value: Any, schema: Schema | None) -> None:
    """Remove nulls of fields without a default, in place: to Kubernetes null means left out."""
    if isinstance(value, list):
        for item in value:
            drop_nulls(item, schema.get("items") if schema else None)
    if not isinstance(value, dict):
        return
    for name in list(value):
        below = _schema_of(name, schema)
        if value[name] is None and below is not None and "default" not in below:
            del value[name]
        else:
            drop_nulls(value[name], below)


def fill_defaults(value: Any, schema: Schema | None) -> None:
    """Fill in the schema's defaults, in place; a null counts as left out."""
    if isinstance(value, list):
        for item in value:
            fill_defaults(item, schema.get("items") if schema else None)
    if not isinstance(value, dict) or schema is None:
        return
    for name, below in schema.get("properties", {}).items():
        if "default" in below and value.get(name) is None:
            value[name] = copy.deepcopy(below["default"])
    for name in value:
        fill_defaults(value[name], _schema_of(name, schema))


def _schema_of(name: str, schema: Schema | None) -> Schema | None:
    if schema is None:
        return None
    found: Schema | None = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
    return found
