"""Runs the CRD's CEL rules on a document, as the API server does at admission."""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import celpy
from celpy import celtypes
from celpy.adapter import json_to_cel
from celpy.evaluation import CELEvalError

from ctj_api.checks.problem import MISSING, Problem, child_path, show
from ctj_api.rules import ALL_RULES, Rule

# cel-python lets some errors of Python through where types do not fit.
_EVALUATION_ERRORS = (CELEvalError, TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError)
# `all` and `exists` over items that cannot be judged quote the error so far in the next: twice as long with each item.
CELEvalError.__repr__ = lambda error: type(error).__name__  # type: ignore[method-assign]
_INT64 = (-(2**63), 2**63 - 1)
_FLOAT_END = 10**308


def rule_problems(document: dict[str, Any], *, old: dict[str, Any] | None, complete: bool) -> list[Problem]:
    """Return every violated rule of a defaulted document.

    `old` is the stored document of an update. When the document is not `complete` (the schema has found problems),
    rules that cannot be evaluated are left out: what they would say is said already.
    """
    problems = []
    for rule in ALL_RULES:
        if rule.is_transition and old is None:
            continue
        for path, value, before in _places(rule.at, document, old):
            problem = _check(rule, path, value, before, complete=complete)
            if problem is not None:
                problems.append(problem)
    return problems


def _check(rule: Rule, path: str, value: Any, before: Any, *, complete: bool) -> Problem | None:
    activation = {"self": json_to_cel(_as_stored(value))}
    if rule.is_transition:
        activation["oldSelf"] = json_to_cel(_as_stored(before))
    try:
        if _program(rule.cel).evaluate(activation):
            return None
    except _EVALUATION_ERRORS:
        if not complete:
            return None
    what, _, remedy = _message(rule, activation).rpartition("; ")
    for part in filter(None, rule.field.split(".")):
        path, value = child_path(path, part), value.get(part, MISSING)
    return Problem(path=path, value=_found(value), rule=what, remedy=remedy)


def _as_stored(value: Any) -> Any:
    """Return a value as the API server's JSON reader holds it: a whole number beyond 64 bits is a float there."""
    if isinstance(value, dict):
        return {key: _as_stored(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_as_stored(item) for item in value]
    if isinstance(value, int) and not _INT64[0] <= value <= _INT64[1]:
        return float(value) if abs(value) < _FLOAT_END else math.inf if value > 0 else -math.inf
    return value


def _found(value: Any) -> str:
    """Rules about a whole list or map name the culprit themselves."""
    return "" if isinstance(value, list | dict) else value if value is MISSING else show(value)


def _message(rule: Rule, activation: dict[str, Any]) -> str:
    if rule.message_cel:
        try:
            return str(_program(rule.message_cel).evaluate(activation))
        except _EVALUATION_ERRORS:
            pass  # the API server falls back to the plain message too
    return rule.message


def _places(at: str, document: Any, old: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield path, value and old value of every place the rule applies to; absent fields have no rules."""
    places: list[tuple[str, Any, Any]] = [("", document, old)]
    for part in filter(None, at.split(".")):
        name = part.removesuffix("[]")
        places = [
            (child_path(path, name), value[name], before.get(name) if isinstance(before, dict) else None)
            for path, value, before in places
            if isinstance(value, dict) and name in value
        ]
        if name != part:
            places = [
                (child_path(path, index), item, None)
                for path, value, _ in places
                if isinstance(value, list)
                for index, item in enumerate(value)
            ]
    return iter(places)


@cache
def _program(expression: str) -> celpy.Runner:
    environment = _environment()
    return environment.program(environment.compile(expression), functions={"format": _format})


@cache
def _environment() -> celpy.Environment:
    # Not CompiledRunner: in 0.5.0 it fails on `has()` beside `&&`.
    return celpy.Environment(runner_class=celpy.InterpretedRunner)


def _format(template: celtypes.StringType, values: celtypes.ListType) -> celtypes.StringType:
    """`'... %s ...'.format([...])` of Kubernetes' string extension."""
    pieces = str(template).split("%s")
    text = pieces[0] + "".join(str(value) + piece for value, piece in zip(values, pieces[1:], strict=True))
    return celtypes.StringType(text)
