"""Whether apiVersion, kind and metadata are what the API server takes for a new job."""

import re
from typing import Any

from ctj_api import names
from ctj_api.checks.fields import drop_unknown_fields
from ctj_api.checks.problem import MISSING, Problem, child_path, show

_TEXT: dict[str, Any] = {"type": "string"}
_NUMBER: dict[str, Any] = {"type": "integer"}
_SWITCH: dict[str, Any] = {"type": "boolean"}
_MAP: dict[str, Any] = {"type": "object", "additionalProperties": _TEXT}
# ObjectMeta of Kubernetes; what is read-only is accepted and ignored there.
_OBJECT_META: dict[str, Any] = {
    "type": "object",
    "properties": {
        **dict.fromkeys(
            (
                "name",
                "generateName",
                "namespace",
                "selfLink",
                "uid",
                "resourceVersion",
                "creationTimestamp",
                "deletionTimestamp",
            ),
            _TEXT,
        ),
        **dict.fromkeys(("labels", "annotations"), _MAP),
        **dict.fromkeys(("generation", "deletionGracePeriodSeconds"), _NUMBER),
        "finalizers": {"type": "array", "items": _TEXT},
        "ownerReferences": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    **dict.fromkeys(("apiVersion", "kind", "name", "uid"), _TEXT),
                    **dict.fromkeys(("controller", "blockOwnerDeletion"), _SWITCH),
                },
            },
        },
        "managedFields": {"type": "array", "items": {"x-kubernetes-preserve-unknown-fields": True}},
    },
}
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_DNS_SUBDOMAIN = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_MAX_ANNOTATION_BYTES = 256 * 1024
_GENERATED_SUFFIX = "x7k2p"  # five characters, as the API server appends to generateName
_LONGEST_GENERATED = 63


def identity_problems(document: dict[str, Any]) -> list[Problem]:
    """Return what is wrong with apiVersion and kind."""
    wanted = {"apiVersion": names.API_VERSION, "kind": names.KIND}
    return [
        Problem(
            path=field,
            value=show(document[field]) if field in document else MISSING,
            rule=f"must be {value}",
            remedy=f"write {field}: {value}",
        )
        for field, value in wanted.items()
        if document.get(field) != value
    ]


def metadata_problems(document: dict[str, Any], *, is_new: bool) -> list[Problem]:
    """Return what is wrong with metadata, and complete it in place as the API server would (a generated name)."""
    metadata = document.get("metadata")
    if not isinstance(metadata, dict):
        document["metadata"] = {}
        found = MISSING if metadata is None else show(metadata)
        return [
            Problem(path="metadata", value=found, rule="must be a map with a name", remedy="add metadata: {name: ...}")
        ]
    problems = drop_unknown_fields(metadata, _OBJECT_META, "metadata")
    problems += _type_problems(metadata)
    if not problems:
        problems += [*_name(metadata), *_labels(metadata), *_annotations(metadata), *_finalizers(metadata)]
    if is_new and metadata.get("resourceVersion"):
        rule = "must not be set for a new job"
        problems.append(_problem("metadata.resourceVersion", metadata["resourceVersion"], rule, "remove it"))
    return problems


def _type_problems(metadata: dict[str, Any]) -> list[Problem]:
    kinds: dict[str, tuple[Any, str]] = {
        "string": (str, "text"),
        "object": (dict, "a map"),
        "array": (list, "a list"),
        "integer": (int, "a whole number"),
    }
    problems = []
    for name, value in list(metadata.items()):
        kind, words = kinds[_OBJECT_META["properties"][name]["type"]]
        if value is None:
            del metadata[name]
        elif not isinstance(value, kind) or isinstance(value, bool):
            problems.append(
                _problem(f"metadata.{name}", value, f"must be {words}", "quote it" if kind is str else "correct it")
            )
        elif isinstance(value, dict):
            problems += [
                _problem(child_path(f"metadata.{name}", key), item, "must be text", f'quote it: "{str(item).lower()}"')
                for key, item in value.items()
                if item is not None and not isinstance(item, str)
            ]
    return problems


def _name(metadata: dict[str, Any]) -> list[Problem]:
    """Check what the CEL rules of the CRD cannot see: that there is a name at all, and the namespace."""
    problems = []
    if not metadata.get("name"):
        prefix = metadata.get("generateName")
        if not prefix:
            problems.append(
                Problem(path="metadata.name", value=MISSING, rule="must be set", remedy="add metadata: {name: my-job}")
            )
        metadata["name"] = f"{prefix or 'unnamed'}"[: _LONGEST_GENERATED - len(_GENERATED_SUFFIX)] + _GENERATED_SUFFIX
    namespace = metadata.get("namespace")
    if namespace and not _DNS_LABEL.fullmatch(namespace):
        rule = "must be at most 63 lower-case letters, digits and dashes"
        problems.append(_problem("metadata.namespace", namespace, rule, "name an existing namespace"))
    return problems


def _labels(metadata: dict[str, Any]) -> list[Problem]:
    problems = _key_problems("metadata.labels", metadata.get("labels", {}))
    for key, value in metadata.get("labels", {}).items():
        if not _LABEL_VALUE.fullmatch(value or ""):
            rule = "must be at most 63 letters, digits, -, _ and ., with a letter or digit at both ends"
            problems.append(
                _problem(child_path("metadata.labels", key), value, rule, "shorten it or use an annotation")
            )
    return problems


def _annotations(metadata: dict[str, Any]) -> list[Problem]:
    annotations = metadata.get("annotations", {})
    # The API server lowers the key first: annotations may be written in any case.
    problems = _key_problems("metadata.annotations", {key.lower(): value for key, value in annotations.items()})
    size = sum(len(key.encode()) + len((value or "").encode()) for key, value in annotations.items())
    if size > _MAX_ANNOTATION_BYTES:
        problems.append(
            Problem(
                path="metadata.annotations",
                value=f"{size} bytes",
                rule=f"must be at most {_MAX_ANNOTATION_BYTES} bytes together",
                remedy="keep large things in files",
            )
        )
    return problems


def _key_problems(path: str, entries: dict[str, Any]) -> list[Problem]:
    return [
        Problem(
            path=child_path(path, key),
            value="not a valid key",
            rule="must be name or dns.domain/name, the name of at most 63 letters, digits, -, _ and .",
            remedy="rename it",
        )
        for key in entries
        if not _is_qualified(key)
    ]


def _is_qualified(key: str) -> bool:
    prefix, slash, name = key.rpartition("/")
    return bool(_QUALIFIED.fullmatch(name)) and (not slash or bool(_DNS_SUBDOMAIN.fullmatch(prefix)))


def _finalizers(metadata: dict[str, Any]) -> list[Problem]:
    return [
        _problem(
            child_path("metadata.finalizers", index), name, "must be a name with a domain", "write example.com/name"
        )
        for index, name in enumerate(metadata.get("finalizers", []))
        if not isinstance(name, str) or "/" not in name or not _is_qualified(name)
    ]


def _problem(path: str, value: Any, rule: str, remedy: str) -> Problem:
    return Problem(path=path, value=show(value), rule=rule, remedy=remedy)
