"""`--set path=value`: change single fields of a document before it is validated."""

import copy
import re
from typing import Any

from ctj_api.checks.problem import Problem, SpecError, show

_PART = re.compile(r"([^.\[\]=]+)|\[([^\[\]]+)\]")
_PATH = re.compile(r"[^.\[\]=]+(\.[^.\[\]=]+|\[[^\[\]]+\])*")

_LONGEST_SHOWN = 56


def override(document: dict[str, Any], *settings: str) -> dict[str, Any]:
    """Return a copy of `document` with each `path=value` applied, as in `spec.ladder[ddp].steps=10`.

    Items of a list are named by position or by their name. A value is read as in a job file, but text where the field
    takes text. `path=` (nothing behind it) removes the field.

    Raises:
        SpecError: a setting cannot be applied; names every one of them.
    """
    result, problems = copy.deepcopy(document), []
    for setting in settings:
        try:
            _apply(result, setting)
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)
    return result


def _apply(document: dict[str, Any], setting: str) -> None:
    path, equals, text = setting.partition("=")
    path = path.strip()
    if not equals or not _PATH.fullmatch(path):
        raise _refuse(setting, "not a setting", "must be path=value", "write for example spec.training.steps=20")
    parts = [name or key for name, key in _PART.findall(path)]
    if parts[0] not in {"spec", "metadata"}:
        raise _refuse(path, "outside of the job", "must start with spec or metadata", f"did you mean spec.{path}?")
    container: Any = document
    for depth, part in enumerate(parts[:-1]):
        container = _step(container, part, ".".join(parts[:depth]))
    _store(container, parts, text)


def _step(container: Any, part: str, path: str) -> Any:
    """Go one part down; maps that are not there yet are made."""
    if isinstance(container, dict):
        if container.get(part) is None:
            container[part] = {}
        return container[part]
    if isinstance(container, list):
        return container[_position(container, part, path)]
    raise _refuse(path, show(container), f"has no {part} inside", "correct the path")


def _position(items: list[Any], part: str, path: str) -> int:
    if part in map(str, range(len(items))):
        return int(part)
    names = [item.get("name") if isinstance(item, dict) else None for item in items]
    if part in names:
        return names.index(part)
    known = ", ".join(str(name) for name in names if name) or f"0 to {len(items) - 1}"
    raise _refuse(f"{path}[{part}]", "not in the list", f"must be one of {known}", "correct the name or the position")


def _store(container: Any, parts: list[str], text: str) -> None:
    last, above = parts[-1], ".".join(parts[:-1])
    if isinstance(container, list):
        position = _position(container, last, above)
        if text:
            container[position] = _value(parts, text)
        else:
            del container[position]
    elif isinstance(container, dict):
        if text:
            container[last] = _value(parts, text)
        else:
            container.pop(last, None)
    else:
        raise _refuse(above, show(container), f"has no {last} inside", "correct the path")


def _value(parts: list[str], text: str) -> Any:
    """Read a value, but leave it text where the field takes text: nobody wants to quote 1e-3 twice in a shell."""
    from ctj_api.checks.yaml_text import read_value

    if _field_schema(parts).get("type") == "string":
        return text
    try:
        return read_value(text)
    except SpecError as error:
        shown = repr(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]} ...")
        remedy = "quote it for YAML and for the shell"
        raise _refuse(".".join(parts), shown, error.problems[0].value, remedy) from None


def _field_schema(parts: list[str]) -> dict[str, Any]:
    from ctj_api.crd import job_schema

    schema: dict[str, Any] = job_schema()
    for part in parts:
        inner = schema.get("items") or schema.get("properties", {}).get(part) or schema.get("additionalProperties")
        schema = inner or {}
    return schema


def _refuse(path: str, value: str, rule: str, remedy: str) -> SpecError:
    return SpecError([Problem(path=f"--set {path}", value=value, rule=rule, remedy=remedy)])
