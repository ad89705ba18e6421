"""What one case of the table is, and the small job that all cases change."""

import copy
import json
from dataclasses import dataclass
from typing import Any

REMOVE = object()
"""Instead of a value: the field is left out."""

Changes = dict[str, Any]

BASE: dict[str, Any] = {
    "apiVersion": "training.ctj.dev/v1alpha1",
    "kind": "CompiledTrainingJob",
    "metadata": {"name": "job"},
    "spec": {
        "recipe": {"name": "causal_lm"},
        "training": {"steps": 100, "globalBatchSize": 16, "microBatchSize": 4},
        "ladder": [
            {"name": "single", "strategy": "single", "steps": 20},
            {"name": "ddp", "strategy": "ddp", "processesPerNode": 2},
        ],
    },
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One document and what must become of it."""

    name: str
    text: str
    problems: tuple[str, ...] = ()
    """Start of every problem's line, in order; empty for a document that is taken."""
    old: str = ""
    """What is stored, when the case is an update."""
    status: dict[str, Any] | None = None
    """Status of what is stored."""
    needs_a_write: bool = False
    """The API server only sees the problem when it stores the document; a dry run is not enough."""

    @property
    def is_good(self) -> bool:
        return not self.problems


def changed(document: dict[str, Any], changes: Changes) -> dict[str, Any]:
    """Return a copy with each `path: value` stored; list items by position."""
    result = copy.deepcopy(document)
    for path, value in changes.items():
        *above, last = (int(part) if part.isdigit() else part for part in path.split("."))
        place: Any = result
        for part in above:
            place = place[part] if isinstance(part, int) else place.setdefault(part, {})
        if value is REMOVE:
            del place[last]
        elif isinstance(place, list) and last == len(place):
            place.append(value)
        else:
            place[last] = value
    return result


def _text(changes: Changes) -> str:
    return json.dumps(changed(BASE, changes), indent=1)


def good(name: str, changes: Changes) -> Case:
    """Build a case that must be taken."""
    return Case(name=name, text=_text(changes))


def bad(name: str, changes: Changes, *problems: str, needs_a_write: bool = False) -> Case:
    """Build a case that must be refused, for these problems."""
    return Case(name=name, text=_text(changes), problems=problems, needs_a_write=needs_a_write)


def update(name: str, changes: Changes, *problems: str, status: dict[str, Any] | None = None) -> Case:
    """Build a change of the stored small job; refused if there are problems."""
    return Case(name=name, text=_text(changes), old=_text({}), problems=problems, status=status)


def as_written(name: str, line: str, *problems: str, under: str = "training") -> Case:
    """Build a case with one more line, written as it stands, below spec.training or another field of spec."""
    text = """\
apiVersion: training.ctj.dev/v1alpha1
kind: CompiledTrainingJob
metadata: {name: job}
spec:
  recipe: {name: causal_lm}
  ladder: [{name: only, strategy: single}]
  training:
    steps: 100
    globalBatchSize: 16
    microBatchSize: 4
"""
    indented = (
        text + ("" if under == "training" else f"  {under}:\n") + "".join(f"    {part}\n" for part in line.split("\n"))
    )
    return Case(name=name, text=indented, problems=problems)


GATE = {"name": "p95", "source": {"report": "stepTimeP95Seconds"}, "thresholdRange": {"max": "1.2"}}
FOUR = [
    {"name": "one", "strategy": "single", "steps": 10},
    {"name": "two", "strategy": "ddp", "steps": 10, "processesPerNode": 2},
    {"name": "three", "strategy": "fsdp", "steps": 10, "processesPerNode": 2, "nodes": 2},
    {"name": "four", "strategy": "zero3", "processesPerNode": 4},
]
PASSED = {"ladder": [{"name": "single", "phase": "Passed"}]}
OPTIMIZER = "spec.training.optimizer"
CHECKPOINT = "spec.training.checkpoint"
