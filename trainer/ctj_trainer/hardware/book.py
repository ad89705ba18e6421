"""The profiles as data: the shipped file, and a platform's own laid over it. Knows no torch and no device."""

import os
import re
from collections.abc import Mapping
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, Field, ValidationError, model_validator

from ctj_api.checks.problem import child_path, show
from ctj_api.model import Contract
from ctj_api.names import ENV_PROFILES_FILE
from ctj_api.spec import Dynamic

OptionValue = bool | int | float | str


class ProfileFileError(ValueError):
    """A platform's profile file cannot be used; every problem with file, path, value and rule."""


class UnknownDeviceError(ValueError):
    """A profile was asked for a device that no entry is about."""


class Kind(StrEnum):
    """What runs the kernels."""

    CUDA = "cuda"
    ROCM = "rocm"
    NPU = "npu"
    CPU = "cpu"


def _expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"must be a regular expression ({error})") from None
    return text


class DeviceEntry(Contract):
    """How a device is recognised."""

    title: str
    kind: Kind
    match: Annotated[str, AfterValidator(_expression), Field(min_length=1)]


class Profile(Contract):
    """What to set on one device; an absent field is not stated. `dtype` is advice: a job's precision is its own."""

    dtype: str = ""
    backend: str = ""
    fallback_backend: str = ""
    mode: str = ""
    options: dict[str, OptionValue] = Field(default_factory=dict)
    dynamic: Dynamic | None = None
    eager: str = ""
    """Why nothing is compiled here; empty: it is."""
    avoid: dict[str, str] = Field(default_factory=dict)
    why: str
    measured: str = "not measured"
    evidence: dict[str, str] = Field(default_factory=dict)
    """Address of a public report, and what it found."""
    contradictions: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> "Profile":
        if self.mode and self.options:
            raise ValueError("mode is a set of options itself and must not stand beside options; null takes one out")
        if self.options and self.backend not in {"", "inductor"}:
            raise ValueError("options are inductor's and must not stand beside another backend; null takes one out")
        return self

    @property
    def states_nothing(self) -> bool:
        """Whether the source names the device only."""
        return not (self.eager or self.backend or self.mode or self.options or self.dynamic or self.dtype)


class Book(Contract):
    """All profiles."""

    devices: dict[Annotated[str, Field(pattern=r"^[a-z0-9]+$")], DeviceEntry]
    eager_precisions: dict[str, str] = Field(default_factory=dict)
    default: dict[str, Profile]
    published: dict[str, Profile]

    def entry(self, kind: Kind, name: str) -> str:
        """Return the key of the device that a driver calls `name`; empty if none matches."""
        return next((key for key, d in self.devices.items() if d.kind is kind and re.search(d.match, name)), "")

    def profile(self, set_name: str, key: str) -> Profile | None:
        """Return the profile of a set for a device, or None where that set has none."""
        profiles = {"default": self.default, "published": self.published}[set_name]
        return profiles.get(key)

    def require(self, key: str) -> DeviceEntry:
        """Return a device's entry.

        Raises:
            UnknownDeviceError: there is none; names those there are.
        """
        if key not in self.devices:
            raise UnknownDeviceError(f"no hardware profile for device {key!r}; there are: {', '.join(self.devices)}")
        return self.devices[key]


def read_book(environment: Mapping[str, str] | None = None) -> Book:
    """Read the shipped profiles, and the platform's over them where CTJ_PROFILES_FILE names a file.

    Raises:
        ProfileFileError: the platform's file cannot be used.
    """
    chosen = (os.environ if environment is None else environment).get(ENV_PROFILES_FILE, "")
    shipped = yaml.safe_load(resources.files(__package__).joinpath("profiles.yaml").read_text(encoding="utf-8"))
    if not chosen:
        return Book.from_document(shipped)
    return _checked(merged(shipped, _read(Path(chosen))), file=chosen)


def merged(below: Any, above: Any) -> Any:
    """Lay one document over another: maps join, null takes out, anything else replaces."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    result = dict(below)
    for key, value in above.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key, {} if isinstance(value, dict) else None), value)
    return result


def _read(file: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileFileError(f"{file}: cannot be read ({error}); correct {ENV_PROFILES_FILE} or the mount") from None
    except yaml.YAMLError as error:
        raise ProfileFileError(f"{file}: is not YAML ({' '.join(str(error).split())})") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ProfileFileError(f"{file}: is {show(document)}; must be a map with devices, default or published")
    return document


def _checked(document: Any, *, file: str) -> Book:
    try:
        book = Book.from_document(document)
    except ValidationError as error:
        raise ProfileFileError("\n".join(_line(file, problem) for problem in error.errors())) from None
    problems = [
        f"{file}: {set_name}.{key}: must be one of devices ({', '.join(book.devices)}), or be added there"
        for set_name, profiles in (("default", book.default), ("published", book.published))
        for key in profiles
        if key not in book.devices
    ]
    if problems:
        raise ProfileFileError("\n".join(problems))
    return book


def _line(file: str, problem: Any) -> str:
    path = ""
    for part in problem["loc"]:
        if part not in {"bool", "int", "float", "str", "[key]"}:  # branches of a union, not fields
            path = child_path(path, part)
    rule = problem["msg"].removeprefix("Value error, ")
    return f"{file}: {path} is {show(problem['input'])}; {rule[0].lower()}{rule[1:]}"
