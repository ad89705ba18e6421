"""How a contract model becomes a Kubernetes structural schema.

A structural schema is JSON Schema without references, unions and closed objects: the API server itself refuses or
prunes what is not listed. Every default is written out, so that a stored job shows all of its settings.
"""

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from ctj_api.model import Contract

PRESERVE = "x-kubernetes-preserve-unknown-fields"
LIST_TYPE = "x-kubernetes-list-type"
LIST_KEYS = "x-kubernetes-list-map-keys"
RULES = "x-kubernetes-validations"

# Said in other ways by a structural schema, or not at all.
_DROPPED = ("title", "$defs", "propertyNames")


def structural_schema(model: type[Contract]) -> dict[str, Any]:
    """Return the schema of `model` as the API server accepts it."""
    raw = model.model_json_schema(by_alias=True, schema_generator=_Generator)
    schema = _inline(raw, definitions=raw.get("$defs", {}))
    assert isinstance(schema, dict)
    return schema


class _Generator(GenerateJsonSchema):
    """Pydantic's generator, with absence instead of null and with defaults for whole objects."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        factory = schema.get("default_factory")
        if factory is dict or (isinstance(factory, type) and issubclass(factory, Contract)):
            # An absent object is filled in, so that the defaults inside it are too.
            return {**self.generate_inner(schema["schema"]), "default": {}}
        if schema.get("default") is None:
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)


def _inline(node: Any, *, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inline(item, definitions=definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target = definitions[node["$ref"].removeprefix("#/$defs/")]
        node = {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    result = {
        key: _inline_value(key, value, definitions=definitions) for key, value in node.items() if key not in _DROPPED
    }
    return _as_kubernetes(result)


def _inline_value(key: str, value: Any, *, definitions: dict[str, Any]) -> Any:
    """Recurse into schemas, never into plain values (a field may be called `title` or `default`)."""
    if key == "properties":
        return {name: _inline(schema, definitions=definitions) for name, schema in value.items()}
    if key in {"items", "additionalProperties"}:
        return _inline(value, definitions=definitions)
    return value


def _as_kubernetes(schema: dict[str, Any]) -> dict[str, Any]:
    if isinstance(schema.get("additionalProperties"), bool):
        del schema["additionalProperties"]
    if schema.get("type") == "integer":
        schema["format"] = "int64"
    if "description" in schema:
        # Docstrings are wrapped for the source; `kubectl explain` wraps by itself.
        schema["description"] = " ".join(schema["description"].split())
    return schema
