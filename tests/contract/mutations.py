"""Chance documents: a good job from the table with one to three fields removed, added or given another value."""

import copy
import json
import random
from typing import Any

from tests.contract.documents import CASES

Place = tuple[Any, Any]
GOOD = [case.text for case in CASES if case.is_good and not case.old and case.text.startswith("{")]
VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    1,
    2,
    -1,
    7.0,
    0.5,
    10**12,
    8,
    16,
    100,
    "",
    "a",
    "ddp",
    "fsdp",
    "zero3",
    "bf16",
    "causal_lm",
    "IfCorrect",
    "DryRun",
    "1e-3",
    "-1",
    "30s",
    "x" * 300,
    [],
    ["ddp"],
    {},
    {"a": "b"},
    {"name": "a"},
)
FIELDS = ("name", "steps", "min", "max", "mode", "options", "config", "volume", "labels", "nonsense", "gpusPerNode")


def mutated(chance: random.Random) -> dict[str, Any]:
    """Return a document that may or may not still be good."""
    document: dict[str, Any] = json.loads(chance.choice(GOOD))
    for _ in range(chance.randint(1, 2)):
        container, key = chance.choice(_places(document) or [(document, "spec")])
        change = chance.randrange(6)
        if change == 0:
            container.pop(key)
        elif change == 1 and isinstance(container[key], dict):
            container[key][chance.choice(FIELDS)] = _value(chance)
        elif change < 4:
            container[key] = _value(chance, like=type(container[key]))
        else:
            container[key] = _value(chance)
    return document


def _value(chance: random.Random, *, like: type = object) -> Any:
    return copy.deepcopy(chance.choice([value for value in VALUES if isinstance(value, like)] or VALUES))


def _places(value: Any) -> list[Place]:
    """Return every (container, key) of a document, spec included, apiVersion and kind too."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [place for key in keys for place in [(value, key), *_places(value[key])]]
