"""The CustomResourceDefinition as a document: names, columns, schema and rules. `generate.py` writes it to a file."""

from typing import Any

from ctj_api import names
from ctj_api.rules import add_rules
from ctj_api.schema import structural_schema
from ctj_api.spec import Spec
from ctj_api.status import Status

CRD_NAME = f"{names.PLURAL}.{names.GROUP}"


def _column(name: str, path: str, *, type: str = "string", wide: bool = False, description: str = "") -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": type, "jsonPath": path}
    if description:
        column["description"] = description
    if wide:
        column["priority"] = 1
    return column


COLUMNS = (
    _column("Phase", ".status.phase", description="Derived from the conditions, for people."),
    _column("Stage", ".status.stage"),
    _column("Mode", ".status.mode", description="Compiled or Eager."),
    _column("Step", ".status.step", type="integer", description="Finished optimizer steps."),
    _column("Progress", ".status.progressPercentage", type="integer", description="Percent of spec.training.steps."),
    _column("Attempt", ".status.attempt", type="integer"),
    _column("Age", ".metadata.creationTimestamp", type="date"),
    _column("Recipe", ".spec.recipe.name", wide=True),
    _column("Remaining", ".status.estimatedRemainingSeconds", type="integer", wide=True, description="Seconds."),
    _column("Stable", ".status.stable.stage", wide=True, description="Last stage that passed its gates."),
    _column("Restarts", ".status.restarts.total", type="integer", wide=True),
    _column("Message", '.status.conditions[?(@.type=="Progressing")].message', wide=True),
)


def job_schema() -> dict[str, Any]:
    """Return the structural schema of a whole CompiledTrainingJob, rules included."""
    schema: dict[str, Any] = {
        "type": "object",
        "description": "A training job that climbs a ladder of strategies, compiled where that is correct and pays.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
            "spec": structural_schema(Spec),
            "status": structural_schema(Status),
        },
    }
    add_rules(schema)
    return schema


def custom_resource_definition() -> dict[str, Any]:
    """Return what is applied to a cluster once."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": CRD_NAME},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": names.PLURAL,
                "singular": names.KIND.lower(),
                "shortNames": [names.SHORT_NAME],
                "categories": [names.CATEGORY],
            },
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": list(COLUMNS),
                    "schema": {"openAPIV3Schema": job_schema()},
                }
            ],
        },
    }
