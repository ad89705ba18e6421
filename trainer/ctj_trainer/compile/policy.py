"""How is a model compiled? One frozen value, whoever asked for it: a job's spec, Accelerate's plugin, or a script.

It knows no torch: `installed.py` says whether this torch can do it, `sources.py` puts it together from what was asked
in several places, `regions.py` carries it out.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ctj_api.spec import Compile, CompileScope, Dynamic, Fallback, Keep, Tolerances

NO_BACKEND = "no"
DEFAULT_BACKEND = "inductor"
_ALIAS = "max_recompiles"
_DYNAMIC = {None: Dynamic.AUTO, False: Dynamic.STATIC, True: Dynamic.DYNAMIC}
_UNLIMITED_PRINT = 60


class CompileConfigError(ValueError):
    """A policy asks for something that does not exist or does not go together; every problem at once."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems) if len(problems) == 1 else "\n  ".join(["cannot compile so:", *problems]))
        self.problems = problems


@dataclass(frozen=True, kw_only=True)
class CompilePolicy:
    """What is compiled, how, and when it is given up. Enums may be given as their text, `dynamic` as torch's bool.

    Raises:
        CompileConfigError: values that exist nowhere or contradict each other.
    """

    scope: CompileScope = CompileScope.REGIONAL
    backend: str | Callable[..., Any] = DEFAULT_BACKEND
    """A name in any case, "no" for none, or a function as torch.compile takes it."""
    mode: str | None = None
    options: Mapping[str, Any] | None = None
    dynamic: Dynamic = Dynamic.AUTO
    dynamic_dims: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Dimensions whose length changes, by name of the batch's tensor: compiled for every length at once."""
    shapes: tuple[Mapping[str, tuple[int, ...]], ...] = ()
    """Batches to warm up on."""
    fullgraph: bool = False
    """A wish, for the record: breaks are counted and named. Never left on: its limit error escapes every fallback."""
    recompile_limit: int = 8
    max_recompiles: int | None = None
    """Another name of `recompile_limit`; read that one."""
    timeout_seconds: int = 1800
    tolerances: Tolerances = field(default_factory=Tolerances)
    keep: Keep = Keep.IF_FASTER
    min_speedup: float = 1.03
    fallback: Fallback = Fallback.EAGER
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Where each value that is no default was said."""
    notices: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """What was corrected, for the person who asked for something else."""

    def __post_init__(self) -> None:
        problems: list[str] = []
        for name, value in _settled(self, problems).items():
            object.__setattr__(self, name, value)
        problems += _contradictions(self)
        if problems:
            raise CompileConfigError(problems)

    @property
    def compiles(self) -> bool:
        """Whether anything is compiled at all."""
        return self.scope is not CompileScope.DISABLED

    @property
    def backend_name(self) -> str:
        """The backend in words."""
        return self.backend if isinstance(self.backend, str) else getattr(self.backend, "__name__", "a function")

    def where(self, name: str) -> str:
        """Where the value of a field was said: `spec.compile.mode`, an environment variable, or `default`."""
        is_default = getattr(self, name) == _default(name)
        return self.origins.get(name, "default" if is_default else "the policy itself")

    def to_document(self) -> dict[str, Any]:
        """Return every value with its origin, to be stored beside the attempt."""
        return {name: {"value": _plain(value), "from": self.where(name)} for name, value in _values(self).items()}

    def lines(self) -> list[str]:
        """Return one line for each value, its origin behind it, and one for each notice."""
        width = max(len(name) for name in _values(self))
        values = (f"  {name:<{width}}  {_shown(value)}  ({self.where(name)})" for name, value in _values(self).items())
        return ["compile policy:", *values, *(f"  notice: {text}" for text in self.notices)]

    def fingerprint(self) -> str:
        """Return a short digest; ranks of one job must have equal ones."""
        text = json.dumps({name: _plain(value) for name, value in _values(self).items()}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def apply(self, model: Any) -> Any:
        """Compile a model, prepared by Accelerate or plain, in place; see `ctj_trainer.accelerate`."""
        from ctj_trainer.accelerate.placing import apply

        return apply(self, model)

    def replaced(self, *, where: str, notice: str = "", **values: Any) -> "CompilePolicy":
        """Return the policy with other values, which came from `where`."""
        notices = (*self.notices, notice) if notice else self.notices
        origins = {**self.origins, **dict.fromkeys(values, where)}
        return dataclasses.replace(self, **values, origins=origins, notices=notices)

    def as_settings(self, asked: Compile) -> Compile:
        """Return `asked` with what it left open filled in."""
        return asked.model_copy(
            update={
                "scope": self.scope,
                "backend": self.backend_name,
                "mode": self.mode,
                "options": dict(self.options) if self.options is not None else None,
                "dynamic": self.dynamic,
                "fullgraph": self.fullgraph,
                "recompile_limit": self.recompile_limit,
            }
        )


def _settled(policy: CompilePolicy, problems: list[str]) -> dict[str, Any]:
    """Return the values that were given in another form, in their own."""
    values: dict[str, Any] = {
        "scope": _member(CompileScope, policy.scope, policy.where("scope"), problems),
        "dynamic": _dynamic(policy, problems),
        "keep": _member(Keep, policy.keep, policy.where("keep"), problems),
        "fallback": _member(Fallback, policy.fallback, policy.where("fallback"), problems),
        "dynamic_dims": {name: tuple(dims) for name, dims in policy.dynamic_dims.items()},
        "shapes": tuple({name: tuple(sizes) for name, sizes in shape.items()} for shape in policy.shapes),
    }
    if isinstance(policy.backend, str):
        values["backend"] = policy.backend.lower()
    if policy.backend is None or values.get("backend") == NO_BACKEND:
        values |= {"backend": NO_BACKEND, "scope": CompileScope.DISABLED}
    if policy.mode == "default":  # torch refuses a mode beside options, also the one that changes nothing
        values["mode"] = None
    return values | _limit(policy, problems)


def _limit(policy: CompilePolicy, problems: list[str]) -> dict[str, Any]:
    """Take the recompile limit from wherever it was said; articles put it among inductor's options."""
    options = dict(policy.options) if policy.options is not None else None
    said = [policy.max_recompiles, (options or {}).pop(_ALIAS, None)]
    others = {value for value in said if value is not None}
    if policy.recompile_limit != _default("recompile_limit"):
        others.add(policy.recompile_limit)
    if len(others) > 1:
        problems.append(f"{_ALIAS} is another name of recompile_limit, and both are set: {sorted(others)}; keep one")
    limit = next(iter(others), policy.recompile_limit)
    return {"recompile_limit": limit, "max_recompiles": None, "options": options or None}


def _contradictions(policy: CompilePolicy) -> list[str]:
    found = []
    if policy.mode is not None and policy.options is not None:
        found.append(
            f"mode is {policy.mode!r} ({policy.where('mode')}) beside options ({policy.where('options')}); "
            "a mode is a set of options itself; remove one of the two"
        )
    if policy.dynamic is Dynamic.STATIC and policy.dynamic_dims:
        found.append(
            f"dynamic is Static ({policy.where('dynamic')}) beside dynamic_dims ({policy.where('dynamic_dims')}), "
            "which would be compiled length by length; remove one of the two"
        )
    if not isinstance(policy.recompile_limit, int) or policy.recompile_limit < 1:
        found.append(
            f"recompile_limit is {policy.recompile_limit!r}; must be a whole number of at least 1; the default is 8"
        )
    if not (isinstance(policy.min_speedup, int | float) and 0 < policy.min_speedup < math.inf):
        found.append(f"min_speedup is {policy.min_speedup!r}; must be a number above 0; the default is 1.03")
    if policy.timeout_seconds < 1:
        found.append(f"timeout_seconds is {policy.timeout_seconds!r}; must be at least 1; the default is 1800")
    return found


def _member(kind: type[StrEnum], value: Any, where: str, problems: list[str]) -> Any:
    known = {member.value.lower(): member for member in kind}
    found = known.get(str(value).lower())
    if found is None:
        problems.append(f"{where} is {value!r}; must be one of {', '.join(member.value for member in kind)}")
    return found or value


def _dynamic(policy: CompilePolicy, problems: list[str]) -> Any:
    if policy.dynamic is None or isinstance(policy.dynamic, bool):
        return _DYNAMIC[policy.dynamic]
    return _member(Dynamic, policy.dynamic, policy.where("dynamic"), problems)


def _values(policy: CompilePolicy) -> dict[str, Any]:
    hidden = {"origins", "notices", _ALIAS}
    return {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy) if f.name not in hidden}


def _plain(value: Any) -> Any:
    if isinstance(value, Tolerances):
        return value.to_document()
    if callable(value):
        return f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', value)}"
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _shown(value: Any) -> str:
    plain = _plain(value)
    text = plain if isinstance(plain, str) else "none" if plain in (None, {}, []) else json.dumps(plain)
    return text if len(text) <= _UNLIMITED_PRINT else text[:_UNLIMITED_PRINT] + " ..."


def _default(name: str) -> Any:
    chosen = _FIELDS[name]
    return chosen.default if chosen.default_factory is dataclasses.MISSING else chosen.default_factory()


_FIELDS = {f.name: f for f in dataclasses.fields(CompilePolicy)}
