"""Which profile applies on this device with this torch, and what becomes of each of its flags? Pure.

What was said elsewhere (spec, Accelerate) wins; mode and options count as one value. Nothing here changes numbers: a
profile's dtype is advice, and options that do change them are named aloud when somebody else's file sets them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ctj_api.spec import Dynamic
from ctj_trainer.hardware.book import Book, OptionValue, Profile
from ctj_trainer.hardware.device import Device
from ctj_trainer.hardware.torch_facts import TorchFacts

INDUCTOR = "inductor"
NONE = "none"


class Outcome(StrEnum):
    """What became of one flag of a profile."""

    APPLIED = "applied"
    RENAMED = "renamed"
    ABSENT = "absent"
    NOT_HERE = "not here"
    OVERRIDDEN = "overridden"
    ADVICE = "advice"


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag of a profile, and what became of it."""

    name: str
    value: OptionValue
    outcome: Outcome
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name}={self.value}: {self.outcome}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True, kw_only=True)
class ResolvedProfile:
    """What a profile comes to."""

    name: str
    """As in default/h100; `none` where nothing is looked up."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What it adds to what was said: of backend, mode, options, dynamic."""
    eager: str = ""
    """Why nothing is compiled here; empty: it is."""
    flags: tuple[Flag, ...] = ()
    notices: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        said = "; ".join(map(str, self.flags)) or "sets nothing"
        return f"hardware profile {self.name}: {said}" + (f"; eager: {self.eager}" if self.eager else "")


# Names that articles and older versions use. Left: as written, dashes as underscores.
_RENAMED = {"cudagraphs": "triton.cudagraphs", "triton_cudagraphs": "triton.cudagraphs"}
_ELSEWHERE = {
    "max_recompiles": "spec.compile.recompileLimit, an argument of torch.compile",
    "cache_size_limit": "spec.compile.recompileLimit, an argument of torch.compile",
    "dynamic_shapes": "spec.compile.dynamic, an argument of torch.compile",
}
_NEVER_WAS = {
    "cubin_cache": "no such option; Triton keeps compiled kernels in the compile cache always",
    "nvfuser_fallback": "torch has no nvFuser any more, so there is nothing to fall back to",
}
_CHANGES_NUMBERS = (
    "use_fast_math",
    "fallback_random",
    "emulate_precision_casts",
    "numerics",
    "signed_zero",
    "denormal",
)


def resolve(  # noqa: PLR0913  # six independent facts
    asked: str, *, book: Book, device: Device, facts: TorchFacts, said: Mapping[str, Any], precision: str
) -> ResolvedProfile:
    """Resolve `spec.compile.profile` (default, published, none, or default/DEVICE) for one device.

    `said` holds what stands above a profile, by name: backend, mode, options, dynamic; absent is not said.

    Raises:
        UnknownDeviceError: it names a device that no entry is about.
    """
    set_name, _, key = asked.partition("/")
    if key:
        book.require(key)
    key = key or book.entry(device.kind, device.name)
    if set_name == NONE:
        return ResolvedProfile(name=NONE)
    profile, name, notices = _looked_up(book, set_name, key, device)
    eager = book.eager_precisions.get(precision, "") or profile.eager
    if eager:
        return ResolvedProfile(name=name, eager=eager, notices=tuple(notices))
    flags = [*_flags(profile, device, facts, said), *_dtype(profile, precision)]
    values = _values(flags)
    notices += [f"{name}: the source contradicts itself: {text}" for text in profile.contradictions]
    notices += _avoided(profile, {**values, **said}, facts)
    notices += [f"{name}: {flag}" for flag in flags if flag.outcome in {Outcome.ABSENT, Outcome.NOT_HERE}]
    return ResolvedProfile(name=name, values=values, flags=tuple(flags), notices=tuple(notices))


def _looked_up(book: Book, set_name: str, key: str, device: Device) -> tuple[Profile, str, list[str]]:
    """Find the profile; where the set says nothing about the device, the default one."""
    profile = book.profile(set_name, key)
    if profile is not None and not (profile.states_nothing and set_name != "default"):
        return profile, f"{set_name}/{key}", []
    default = book.profile("default", key)
    if default is None:
        why = f"no hardware profile for {device.name}: inductor's own defaults"
        return Profile(why=why), f"{set_name}/unknown", [why]
    return (
        default,
        f"default/{key}",
        [f"{set_name}/{key} states no flags ({profile.why}): default/{key}"] if profile else [],
    )


def _flags(profile: Profile, device: Device, facts: TorchFacts, said: Mapping[str, Any]) -> list[Flag]:
    flags = []
    if profile.backend:
        flags.append(_backend(profile.backend, facts, said))
    if profile.fallback_backend:
        detail = "torch.compile takes one backend, and a failing region falls back to eager; for this one write it in "
        flags.append(
            Flag(
                name="fallbackBackend",
                value=profile.fallback_backend,
                outcome=Outcome.NOT_HERE,
                detail=f"{detail}spec.compile.backend",
            )
        )
    if profile.mode:
        flags.append(_mode(profile.mode, facts, said))
    flags += [_option(name, value, device, facts, said) for name, value in profile.options.items()]
    if profile.dynamic is not None:
        flags.append(_dynamic(profile.dynamic, said))
    return flags


def _backend(backend: str, facts: TorchFacts, said: Mapping[str, Any]) -> Flag:
    if said.get("backend", backend) != backend:
        outcome, detail = Outcome.OVERRIDDEN, f"the job says {said['backend']}"
    elif backend not in facts.backends:
        outcome, detail = Outcome.ABSENT, f"torch {facts.version} has no such backend"
    else:
        outcome, detail = Outcome.APPLIED, ""
    return Flag(name="backend", value=backend, outcome=outcome, detail=detail)


def _mode(mode: str, facts: TorchFacts, said: Mapping[str, Any]) -> Flag:
    if over := _in_the_way(said):
        outcome, detail = Outcome.OVERRIDDEN, over
    elif mode not in facts.modes:
        outcome, detail = Outcome.ABSENT, f"torch {facts.version} has no such mode"
    else:
        outcome, detail = Outcome.APPLIED, ""
    return Flag(name="mode", value=mode, outcome=outcome, detail=detail)


def _in_the_way(said: Mapping[str, Any]) -> str:
    """What the job says that a profile's mode or options cannot stand beside."""
    if said.get("backend", INDUCTOR) != INDUCTOR:
        return f"the job's backend {said['backend']} takes none"
    if "mode" in said:
        return f"the job's mode is {said['mode'] or 'default'}"
    return "the job gives options of its own" if "options" in said else ""


def _option(name: str, value: OptionValue, device: Device, facts: TorchFacts, said: Mapping[str, Any]) -> Flag:
    written = name.replace("-", "_")
    known = written if written in facts.options else _RENAMED.get(written, "")
    outcome, detail = _verdict(written, known, value, device, facts)
    if known and outcome in {Outcome.APPLIED, Outcome.RENAMED} and (over := _in_the_way(said)):
        outcome, detail = Outcome.OVERRIDDEN, over
    return Flag(name=name, value=value, outcome=outcome, detail=detail)


def _verdict(written: str, known: str, value: OptionValue, device: Device, facts: TorchFacts) -> tuple[Outcome, str]:
    """Judge one option by the installed torch and the device."""
    if not known:
        if written in _ELSEWHERE:
            return Outcome.RENAMED, f"not an option: {_ELSEWHERE[written]}"
        return Outcome.ABSENT, _NEVER_WAS.get(written, f"torch {facts.version} has no such option")
    wanted = facts.options[known]
    if wanted and not _fits(value, wanted):
        return Outcome.ABSENT, f"torch wants {wanted} for it"
    if value and (why := device.refuses(known)):
        return Outcome.NOT_HERE, why
    notes = ["changes the numbers that compiled code computes"] * any(part in known for part in _CHANGES_NUMBERS)
    if value and known == "max_autotune":
        notes += filter(None, [device.untuned_products()])
    if known != written:
        return Outcome.RENAMED, "; ".join([f"now {known}", *notes])
    return Outcome.APPLIED, "; ".join(notes)


def _fits(value: OptionValue, wanted: str) -> bool:
    """As torch checks it: isinstance, so true is an int, and 1 is not a bool."""
    return isinstance(value, {"bool": bool, "int": int, "float": float, "str": str}[wanted])


def _dynamic(dynamic: Dynamic, said: Mapping[str, Any]) -> Flag:
    over = next((name for name in ("dynamic", "dynamic_dims") if name in said), "")
    if over:
        outcome, detail = Outcome.OVERRIDDEN, f"the job gives {over} itself"
    else:
        outcome, detail = Outcome.APPLIED, "an argument of torch.compile"
    return Flag(name="dynamic", value=dynamic.value, outcome=outcome, detail=detail)


def _dtype(profile: Profile, precision: str) -> list[Flag]:
    if not profile.dtype or profile.dtype == precision:
        return []
    stays = f", and stays {precision}" if precision else ""
    detail = f"a profile changes no numbers: spec.training.precision decides{stays}"
    return [Flag(name="dtype", value=profile.dtype, outcome=Outcome.ADVICE, detail=detail)]


def _values(flags: Iterable[Flag]) -> dict[str, Any]:
    """Put together what applies."""
    values: dict[str, Any] = {}
    options: dict[str, OptionValue] = {}
    for flag in flags:
        written = flag.name.replace("-", "_")
        if flag.outcome not in {Outcome.APPLIED, Outcome.RENAMED} or written in _ELSEWHERE:
            continue
        if flag.name in {"backend", "mode"}:
            values[flag.name] = flag.value
        elif flag.name == "dynamic":
            values["dynamic"] = Dynamic(str(flag.value))
        else:
            options[_RENAMED.get(written, written)] = flag.value
    return values | ({"options": options} if options else {})


def _avoided(profile: Profile, chosen: Mapping[str, Any], facts: TorchFacts) -> list[str]:
    """Name what is on although this device's profile advises against it."""
    options = {**facts.modes.get(chosen.get("mode") or "", {}), **(chosen.get("options") or {})}
    return [
        f"{name} is on, against the advice for this device: {profile.avoid[name]}"
        for name, value in options.items()
        if value and name in profile.avoid
    ]
