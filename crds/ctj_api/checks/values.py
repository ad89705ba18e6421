"""Whether every value has the type, the range and the form that the schema asks for."""

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jsonschema

from ctj_api.checks.problem import MISSING, Problem, child_path, show
from ctj_api.model import FORMS
from ctj_api.schema import LIST_KEYS, LIST_TYPE

Schema = dict[str, Any]


def value_problems(value: Any, schema: Schema) -> list[Problem]:
    """Return every violation of the schema, the first of each place."""
    found = [*map(_problem, _Validator(schema).iter_errors(value)), *_repetitions(value, schema, "")]
    first: dict[str, Problem] = {}
    for problem in sorted(found, key=lambda problem: problem.path):
        first.setdefault(problem.path, problem)
    return list(first.values())


def drop_unreadable(value: Any, schema: Schema) -> None:
    """Remove, in place, what no rule can read: values of a wrong type or over a size limit of the schema.

    The API server runs no rule on such a document. We run those that need nothing of it, to say all at once; given
    the rest too, a list of thousands or a text in place of a list would cost cel-python minutes and gigabytes.
    """
    for error in list(_Validator(schema).iter_errors(value)):
        if error.validator in _UNREADABLE:
            _drop(value, list(error.absolute_path))


def _drop(value: Any, path: list[Any]) -> None:
    """Remove the value at `path` or, as items must keep their places, the field whose list holds it."""
    while path and isinstance(path[-1], int):
        path.pop()
    for part in path[:-1]:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return  # gone with what held it
    if path and isinstance(value, dict):
        value.pop(path[-1], None)


_UNREADABLE = {"type", "maxLength", "maxItems", "maxProperties"}


def _pattern(_validator: Any, pattern: str, value: Any, _schema: Schema) -> Iterator[jsonschema.ValidationError]:
    # `$` of the API server's RE2 is the very end; Python's also allows a line break before it.
    if isinstance(value, str) and not _matches(pattern, value):
        yield jsonschema.ValidationError(f"does not match {pattern}")


def _matches(pattern: str, value: str) -> bool:
    return re.search(pattern.removesuffix("$") + r"\Z" if pattern.endswith("$") else pattern, value) is not None


_Validator: Any = jsonschema.validators.extend(  # type: ignore[no-untyped-call]
    jsonschema.Draft202012Validator, {"pattern": _pattern}
)


def _problem(error: Any) -> Problem:
    path = ""
    for part in error.absolute_path:
        path = child_path(path, part)
    if error.validator == "required":
        return _missing(error, path)
    rule, remedy = _WORDING[str(error.validator)](error)
    return Problem(path=path or "the document", value=_found(error), rule=rule, remedy=remedy)


def _found(error: Any) -> str:
    if error.validator in {"minItems", "maxItems"}:
        return f"a list of {len(error.instance)}"
    if error.validator == "maxProperties":
        return f"a map of {len(error.instance)}"
    return show(error.instance)


def _missing(error: Any, path: str) -> Problem:
    name = next(name for name in error.validator_value if f"'{name}' is a required" in error.message)
    below = error.schema["properties"][name]
    meaning = below.get("description", "").rstrip(".")
    return Problem(
        path=child_path(path, name),
        value=MISSING,
        rule="must be set" + (f" ({meaning[:1].lower()}{meaning[1:]})" if meaning else ""),
        remedy=f"add {name}: {_example(below)}",
    )


def _example(schema: Schema) -> str:
    if "enum" in schema:
        return str(schema["enum"][0])
    return {"integer": str(schema.get("minimum", 1)), "string": '"..."', "array": "[...]", "object": "{...}"}.get(
        schema["type"], "..."
    )


def _type(error: Any) -> tuple[str, str]:
    wanted = {
        "integer": "a whole number",
        "string": "text",
        "object": "a map",
        "array": "a list",
        "boolean": "true or false",
    }
    kind = error.validator_value
    remedy = f"write {_example(error.schema)}"
    if kind == "string" and isinstance(error.instance, int | float | bool):
        remedy = f"quote it: {json.dumps(str(error.instance))}"
    return f"must be {wanted.get(kind, kind)}", remedy


def _enum(error: Any) -> tuple[str, str]:
    allowed = [str(value) for value in error.validator_value]
    lowered = {value.lower(): value for value in allowed}
    nearest = difflib.get_close_matches(str(error.instance).lower(), lowered, n=1, cutoff=0.6)
    return (
        f"must be one of {', '.join(allowed)}",
        f"did you mean {lowered[nearest[0]]}?" if nearest else "use one of these",
    )


def _form(error: Any) -> tuple[str, str]:
    rule, example = FORMS.get(error.validator_value, (f"must match {error.validator_value}", ""))
    return rule, f"write for example {json.dumps(example)}" if example else "correct it"


def _limit(rule: str, remedy: str) -> Any:
    return lambda error: (rule.format(error.validator_value), remedy.format(error.validator_value))


_WORDING: dict[str, Any] = {
    "type": _type,
    "enum": _enum,
    "pattern": _form,
    "minimum": _limit("must be at least {}", "use {} or more"),
    "maximum": _limit("must be at most {}", "use {} or less"),
    "minLength": _limit("must have at least {} character", "fill it in or leave the field out"),
    "maxLength": _limit("must have at most {} characters", "shorten it"),
    "minItems": _limit("must have at least {} item", "add one"),
    "maxItems": _limit("must have at most {} items", "remove some"),
    "maxProperties": _limit("must have at most {} entries", "remove some"),
}


def _repetitions(value: Any, schema: Schema, path: str) -> list[Problem]:
    """Return items of a list that share the key (or, in a set, the value) that must tell them apart."""
    if isinstance(value, dict):
        return [
            problem
            for name, below in schema.get("properties", {}).items()
            if name in value
            for problem in _repetitions(value[name], below, child_path(path, name))
        ]
    if not isinstance(value, list) or "items" not in schema:
        return []
    problems = [
        problem
        for index, item in enumerate(value)
        for problem in _repetitions(item, schema["items"], child_path(path, index))
    ]
    key = schema.get(LIST_KEYS, [""])[0]
    if LIST_TYPE in schema:
        identities = [json.dumps(item.get(key) if key and isinstance(item, dict) else item) for item in value]
        problems += [
            Problem(
                path=path,
                value=f"a list with {key or 'item'} {identity} {count} times",
                rule=f"each {key or 'item'} may appear once",
                remedy="rename or remove the others",
            )
            for identity, count in Counter(identities).items()
            if count > 1
        ]
    return problems
