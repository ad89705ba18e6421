"""YAML as Kubernetes reads it, which is not as PyYAML reads it.

The API server and kubectl use a YAML 1.1 reader of their own: `1e-3` is a number, `y` is true, `1:30` and dates are
text, a key given twice is an error. A job must mean the same thing to `ctj run` and to `kubectl apply`.
"""

import base64
import binascii
import math
import re
from collections.abc import Iterator
from typing import Any

import yaml

from ctj_api.checks.problem import Problem, SpecError

_PLAIN = "!plain"  # our own tag: neither quoted nor tagged, so the text decides
_STANDARD = "tag:yaml.org,2002:"
_TRUE = {"y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"}
_FALSE = {"n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"}
_NULL = {"", "~", "null", "Null", "NULL"}
_NOT_JSON = {".nan", ".NaN", ".NAN"} | {sign + text for sign in ("", "+", "-") for text in (".inf", ".Inf", ".INF")}
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INTEGER = re.compile(
    r"(?P<sign>[-+]?)(0[xX](?P<hex>[0-9a-fA-F]+)|0[bB](?P<bin>[01]+)|0[oO]?(?P<oct>[0-7]+)|(?P<dec>0|[1-9][0-9]*))"
)
_MAX_VALUES = 200_000  # aliases of aliases can grow without end
_MAX_DEPTH = 64  # every reader of a document, ours and others', goes down by recursion
_MAX_TEXT = 3 * 1024 * 1024  # an API server reads no more in one request
MAX_FILE_BYTES = 4 * _MAX_TEXT  # a character of UTF-8 has at most four bytes
_LONGEST_INTEGER = 20


class _Loader(yaml.CBaseLoader if hasattr(yaml, "CBaseLoader") else yaml.BaseLoader):  # type: ignore[misc]
    """Composes nodes; plain scalars keep a tag that says so."""

    def resolve(self, kind: type[yaml.Node], value: str, implicit: Any) -> str:
        if kind is yaml.ScalarNode and implicit[0]:
            return _PLAIN
        return str(super().resolve(kind, value, implicit))


def read_documents(text: str) -> list[Any]:
    """Return the plain value of every document in `text`; empty documents are left out.

    Raises:
        SpecError: not YAML, or not a document that JSON can hold.
    """
    if len(text) > _MAX_TEXT:
        raise SpecError([_too_long(text)])
    values = []
    try:
        for node in yaml.compose_all(text, Loader=_Loader):
            reader = _Reader()
            value = reader.value(node)
            if reader.problems:
                raise SpecError(reader.problems)
            if value is not None:
                values.append(value)
    except yaml.YAMLError as error:
        raise SpecError([_syntax_problem(error)]) from None
    return values


def read_value(text: str) -> Any:
    """Return what a single value means when it stands in a job file.

    Raises:
        SpecError: not YAML.
    """
    documents = read_documents(text)
    return documents[0] if documents else None


class _Reader:
    """One pass over one document's nodes; collects problems instead of stopping at the first."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._open: set[int] = set()
        self._count = 0

    def value(self, node: yaml.Node) -> Any:
        self._count += 1
        if (found := self._endless(node)) is not None:
            raise SpecError([_problem(node, *found)])
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node)
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item) for item in node.value]
            assert isinstance(node, yaml.ScalarNode)
            return self._scalar(node)
        finally:
            self._open.discard(id(node))

    def _endless(self, node: yaml.Node) -> tuple[str, str, str] | None:
        """Return value, rule and remedy where a document does not end, or not soon enough."""
        if id(node) in self._open:
            return "an alias of itself", "a document must be finite", "write the values out"
        if len(self._open) >= _MAX_DEPTH:
            return f"nested more than {_MAX_DEPTH} deep", f"must be at most {_MAX_DEPTH} deep", "flatten it"
        if self._count > _MAX_VALUES:
            return (
                f"value {_MAX_VALUES + 1}, each alias counted as what it repeats",
                f"a document may hold {_MAX_VALUES} values",
                "keep large things in files and name their paths",
            )
        return None

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            pairs = self._merged(value_node) if _is_merge(key_node) else [(self._key(key_node), self.value(value_node))]
            for key, value in pairs:
                if key in result:
                    self.problems.append(
                        _problem(
                            key_node, f'key "{key}" given twice', "a key may be given once", "remove one of the two"
                        )
                    )
                result[key] = value
        return result

    def _merged(self, node: yaml.Node) -> Iterator[tuple[str, Any]]:
        """Return the pairs behind `<<`, of one map or of several."""
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for item in reversed(nodes):
            if not isinstance(item, yaml.MappingNode):
                raise SpecError(
                    [
                        _problem(
                            item, "not a map behind <<", "only maps can be merged", "give << a map or an alias of one"
                        )
                    ]
                )
            yield from self._mapping(item).items()

    def _key(self, node: yaml.Node) -> str:
        key = self._scalar(node) if isinstance(node, yaml.ScalarNode) else None
        if key is None:
            raise SpecError([_problem(node, "a list, a map or null as a key", "keys must be text", "quote the key")])
        if isinstance(key, bool):
            return "true" if key else "false"
        return key if isinstance(key, str) else f"{key:g}" if isinstance(key, float) else str(key)

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        if node.tag == _PLAIN:
            return self._plain(node)
        name = node.tag.removeprefix(_STANDARD)
        if name == "binary":
            return self._binary(node)
        if name in {"int", "float", "bool", "null", "timestamp"}:
            return self._tagged(node, name)
        return node.value

    def _plain(self, node: yaml.ScalarNode) -> Any:
        if node.value in _NOT_JSON:
            self.problems.append(
                _problem(node, node.value, "JSON has no such number", "write a finite number or quoted text")
            )
            return None
        value = plain_value(node.value)
        if isinstance(value, float) and not math.isfinite(value):
            return node.value
        return value

    def _tagged(self, node: yaml.ScalarNode, name: str) -> Any:
        value = self._plain(node)
        kinds: dict[str, tuple[type, ...]] = {
            "int": (int,),
            "float": (int, float),
            "bool": (bool,),
            "null": (type(None),),
        }
        wanted = kinds.get(name, (str,))
        if not isinstance(value, wanted) or (isinstance(value, bool) and name != "bool"):
            self.problems.append(
                _problem(node, f"{node.value!r} tagged !!{name}", "tag and text must agree", "remove the tag")
            )
        return value

    def _binary(self, node: yaml.ScalarNode) -> str:
        try:
            return base64.b64decode("".join(node.value.split()), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            self.problems.append(_problem(node, "!!binary", "it must be base64 of text", "write the text itself"))
            return ""


def plain_value(text: str) -> Any:
    """Return what an unquoted scalar means to Kubernetes."""
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if text[0] == "." and _FLOAT.fullmatch(text):
        return _number(text)
    if text[0] not in "+-0123456789":
        return text
    digits = text.replace("_", "")
    integer = _integer(digits)
    if integer is not None:
        return integer
    return _number(digits) if _FLOAT.fullmatch(digits) else text


def _number(text: str) -> float | int:
    """Return a number as JSON holds it, into which YAML is turned on its way to the API server: there 7.0 is 7."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 1e21 else value


def _integer(digits: str) -> int | None:
    match = _INTEGER.fullmatch(digits)
    if match is None:
        return None
    for name, base in (("hex", 16), ("bin", 2), ("oct", 8), ("dec", 10)):
        if match[name] and not (name == "dec" and len(match[name]) > _LONGEST_INTEGER):
            value = int(match["sign"] + match[name], base)
            return value if -(2**63) <= value < 2**64 else None
    return None


def _is_merge(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.value == "<<" and node.tag in {_PLAIN, _STANDARD + "merge"}


def _problem(node: yaml.Node, value: str, rule: str, remedy: str) -> Problem:
    return Problem(path=f"line {node.start_mark.line + 1}", value=value, rule=rule, remedy=remedy)


def _too_long(text: str) -> Problem:
    return Problem(
        path="the file",
        value=f"{len(text)} characters",
        rule=f"must have at most {_MAX_TEXT}, all that an API server reads at once",
        remedy="keep large things in files and name their paths",
    )


def too_large(path: str, size: int) -> Problem:
    """Describe a file of `size` bytes (0: unknown, more than may be read) that need not be read to be refused."""
    return Problem(
        path=path,
        value=f"{size} bytes" if size else f"more than {MAX_FILE_BYTES} bytes",
        rule=f"must have at most {_MAX_TEXT} characters, all that an API server reads at once",
        remedy="keep large things in files and name their paths",
    )


def _syntax_problem(error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "the file"
    detail = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
    return Problem(
        path=where,
        value=f"not YAML ({detail})",
        rule="a job file must be YAML",
        remedy="correct the indentation, quotes or brackets there",
    )
