"""What is wrong with a document, in the words of the person who must act."""

import json
from dataclasses import dataclass
from typing import Any

MISSING = "missing"
_LONGEST_VALUE = 60


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing to correct; `str()` is one readable line."""

    path: str
    """Field path from the document's root, as in `spec.ladder[1].steps`; `line 3` where there is no document yet."""
    value: str
    """What is there now, as text; empty where it would be too much to read."""
    rule: str
    remedy: str

    def __str__(self) -> str:
        found = f"{self.path} is {self.value}; " if self.value else f"{self.path}: "
        return f"{found}{self.rule}; {self.remedy}"


class SpecError(ValueError):
    """A document that cannot be accepted; holds every problem, not only the first."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


def show(value: Any) -> str:
    """Return a value as it would be written in a file, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 4]} ..."


def child_path(parent: str, key: str | int) -> str:
    """Return the path of a field or an item below `parent`."""
    if isinstance(key, int):
        return f"{parent}[{key}]"
    if not key.replace("-", "").replace("_", "").isalnum():
        return f'{parent}["{key}"]'
    return f"{parent}.{key}" if parent else key
