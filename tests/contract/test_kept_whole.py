"""What is written to the real API server is kept whole: every field of status, every example, the printed columns."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.control_plane import ControlPlane

from ctj_api.generate import ROOT
from ctj_api.schema import structural_schema
from ctj_api.spec import Measurement
from ctj_api.status import Status

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example_is_taken(example: Path, crd_installed: ControlPlane) -> None:
    said = crd_installed.kubectl("create", "--dry-run=server", "--validate=strict", "-f", str(example))

    assert "created (server dry run)" in said


def test_no_field_of_status_is_pruned_and_columns_show_it(crd_installed: ControlPlane, namespace: str) -> None:
    plane, job = crd_installed, "ctj/quickstart"
    plane.kubectl("-n", namespace, "create", "-f", str(ROOT / "examples" / "quickstart.yaml"))
    status = example_of(structural_schema(Status))
    assert Status.from_document(status).to_document() == status

    plane.kubectl(
        "-n", namespace, "patch", job, "--subresource=status", "--type=merge", "-p", json.dumps({"status": status})
    )

    assert json.loads(plane.kubectl("-n", namespace, "get", job, "-o", "json"))["status"] == status
    header, row = plane.kubectl("-n", namespace, "get", job).splitlines()
    assert header.split() == ["NAME", "PHASE", "STAGE", "MODE", "STEP", "PROGRESS", "ATTEMPT", "AGE"]
    assert row.split()[:7] == ["quickstart", "Pending", "text", "Compiled", "7", "7", "7"]


def test_explain_describes_a_field(crd_installed: ControlPlane) -> None:
    said = crd_installed.kubectl("explain", "ctj.spec.training.globalBatchSize")

    assert "Sequences per optimizer step, in every stage" in said


TEXTS = ("text", "1.5", "0" * 64)  # the first that a field's pattern allows


def example_of(schema: dict[str, Any]) -> Any:
    """Return a value with every field set."""
    if "properties" in schema:
        return {field: example_of(below) for field, below in schema["properties"].items()}
    if "additionalProperties" in schema:
        return {Measurement.FINAL_LOSS.value: example_of(schema["additionalProperties"])}
    if "items" in schema:
        return [example_of(schema["items"])]
    if "enum" in schema:
        return schema["enum"][0]
    pattern = schema.get("pattern", "")
    text = "2026-01-01T00:00:00Z" if "format" in schema else next(t for t in TEXTS if re.search(pattern, t))
    return {"integer": 7, "number": 1.5, "boolean": True, "string": text}[schema["type"]]
