"""What is generated from the contract is up to date, and is a schema that a cluster takes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ctj_api.crd import custom_resource_definition, job_schema
from ctj_api.generate import ROOT, generated_files, outdated, write
from ctj_api.rules import ALL_RULES
from ctj_api.schema import PRESERVE
from ctj_api.spec import Spec

FORBIDDEN = {"$ref", "$defs", "anyOf", "oneOf", "allOf", "const", "title", "propertyNames", "prefixItems"}


def test_generated_files_are_up_to_date() -> None:
    assert outdated(ROOT) == [], "run `python -m ctj_api.generate`"


def test_missing_and_changed_files_are_noticed(tmp_path: Path) -> None:
    assert outdated(tmp_path) == list(generated_files())
    write(tmp_path)
    assert outdated(tmp_path) == []
    changed = tmp_path / "crds" / "compiledtrainingjobs.yaml"
    changed.write_text(changed.read_text().replace("short", "long"))
    assert outdated(tmp_path) == [Path("crds/compiledtrainingjobs.yaml")]


def test_crd_is_small_enough_for_a_client_side_apply() -> None:
    # kubectl keeps the whole document in an annotation, and annotations end at 256 KiB.
    assert len(generated_files()[Path("crds/compiledtrainingjobs.yaml")].encode()) < 262_144


def test_schema_is_structural() -> None:
    for path, schema in _schemas(job_schema()):
        assert not FORBIDDEN & set(schema), path
        assert "type" in schema, path
        assert not ("properties" in schema and "additionalProperties" in schema), path


def test_every_field_a_person_may_set_is_described_and_bounded() -> None:
    for path, schema in _schemas(job_schema()["properties"]["spec"]):
        if path and not path.endswith(("[]", "{}")):
            assert schema.get("description"), path
        if schema["type"] == "string" and not path.endswith("{}"):
            assert "enum" in schema or "maxLength" in schema, path
        if schema["type"] == "array":
            assert "maxItems" in schema, path
        if schema["type"] == "integer":
            assert "minimum" in schema, path
            assert "maximum" in schema, path


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: f"{rule.at}.{rule.field}")
def test_message_of_a_rule_says_what_must_hold_and_what_to_do(rule: Any) -> None:
    assert rule.message.count("; ") == 1
    assert "\n" not in rule.cel + rule.message + rule.message_cel


def test_columns_show_progress_first_and_the_rest_when_asked() -> None:
    columns = custom_resource_definition()["spec"]["versions"][0]["additionalPrinterColumns"]

    narrow = [column["name"] for column in columns if not column.get("priority")]
    assert narrow == ["Phase", "Stage", "Mode", "Step", "Progress", "Attempt", "Age"]


def test_defaults_of_schema_and_model_agree() -> None:
    from tests.contract.documents.case import BASE

    from ctj_api.validate import admit

    admitted = admit(BASE)["spec"]

    assert Spec.from_document(admitted) == Spec.from_document(BASE["spec"])


def _schemas(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, below in schema.get("properties", {}).items():
        yield from _schemas(below, f"{path}.{name}")
    if "items" in schema:
        yield from _schemas(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from _schemas(schema["additionalProperties"], f"{path}{{}}")
    if PRESERVE in schema:
        assert "properties" not in schema, path
