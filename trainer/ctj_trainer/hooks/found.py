"""Which functions run around the computation of a model's modules? One finder per family, recognised by structure.

Recognised: Accelerate's hooks (`module._hf_hook`), diffusers' (`module._diffusers_hook`: group offload, layerwise
casting), a forward that was replaced by an excluded function, and torch's own forward hooks that have side effects.
Neither library is imported.
"""

import functools
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import nn

from ctj_trainer.hooks.effects import Effect, effects_of, unwrapped
from ctj_trainer.hooks.excluded import is_excluded, no_compile


class Family(StrEnum):
    """Who placed a hook, and so how it is called."""

    ACCELERATE = "Accelerate hook"
    DIFFUSERS = "diffusers hook"
    REPLACED = "replaced forward"
    TORCH = "forward hook"


# Sharding and gathering belong to the strategy: it places its hooks so that they work with compiled blocks.
_STRATEGIES = ("torch.distributed", "deepspeed.runtime", "torch.nn.parallel")


@dataclass(frozen=True, kw_only=True, eq=False)
class EntryPoint:
    """One function that runs around a module's computation, and where it is looked up."""

    module: str
    family: Family
    kind: str
    point: str
    function: Callable[..., Any]
    effects: frozenset[Effect]
    replace: Callable[[Callable[..., Any]], None]

    @property
    def is_excluded(self) -> bool:
        """Whether the compiler stays out of it."""
        return is_excluded(self.function)

    def exclude(self) -> None:
        """Keep it out of compiled graphs from now on."""
        self.replace(no_compile(self.function, reason=f"{self.family} {self.kind}.{self.point}"))

    def __str__(self) -> str:
        does = ", ".join(sorted(self.effects)) or "may have side effects"
        return f"{self.module or 'the model'}: {self.family} {self.kind}.{self.point} ({does})"


def entry_points(model: nn.Module) -> list[EntryPoint]:
    """Return every hook of the model that must stay out of compiled graphs, excluded or not."""
    found: list[EntryPoint] = []
    for name, module in model.named_modules():
        for finder in (_accelerate, _diffusers, _replaced, _torch_hooks):
            found += finder(name, module)
    return found


def _accelerate(name: str, module: nn.Module) -> Iterator[EntryPoint]:
    """Its lazy exclusion covers the library's own hooks; subclasses of plain ModelHook are traced."""
    hook = module.__dict__.get("_hf_hook")
    if hook is None:
        return
    for point in ("pre_forward", "post_forward"):
        if not _does_nothing(getattr(hook, point)):
            yield _on_attribute(name, hook, point, family=Family.ACCELERATE, kind=type(hook).__name__)


def _diffusers(name: str, module: nn.Module) -> Iterator[EntryPoint]:
    registry = module.__dict__.get("_diffusers_hook")
    kinds = [type(hook).__name__ for hook in getattr(registry, "hooks", {}).values()]
    for index, reference in enumerate(getattr(registry, "_fn_refs", ())):
        for point in ("pre_forward", "post_forward"):
            if not _does_nothing(getattr(reference, point)):
                kind = kinds[index] if index < len(kinds) else type(reference).__name__
                yield _on_attribute(name, reference, point, family=Family.DIFFUSERS, kind=kind)


def _replaced(name: str, module: nn.Module) -> Iterator[EntryPoint]:
    """A forward swapped for an excluded function compiles to nothing, without a word."""
    forward = module.__dict__.get("forward")
    is_known = "_hf_hook" in module.__dict__ or "_diffusers_hook" in module.__dict__
    if forward is not None and not is_known and is_excluded(forward):
        kind = getattr(forward, "__qualname__", type(forward).__name__)
        yield _on_attribute(name, module, "forward", family=Family.REPLACED, kind=kind)


def _torch_hooks(name: str, module: nn.Module) -> Iterator[EntryPoint]:
    for point, hooks in (
        ("forward_pre_hook", module._forward_pre_hooks),
        ("forward_hook", module._forward_hooks),
    ):
        for key, hook in hooks.items():
            effects = effects_of(hook)
            if is_strategy(hook) or not (effects or is_excluded(hook)):
                continue
            yield EntryPoint(
                module=name,
                family=Family.TORCH,
                kind=getattr(hook, "__qualname__", type(hook).__name__),
                point=point,
                function=hook,
                effects=effects,
                replace=functools.partial(_put, hooks, key),
            )


def _on_attribute(name: str, owner: Any, attribute: str, *, family: Family, kind: str) -> EntryPoint:
    function = getattr(owner, attribute)
    return EntryPoint(
        module=name,
        family=family,
        kind=kind,
        point=attribute,
        function=function,
        effects=effects_of(function),
        replace=functools.partial(setattr, owner, attribute),
    )


def _put(hooks: MutableMapping[int, Any], key: int, function: Callable[..., Any]) -> None:
    hooks[key] = function


def _does_nothing(function: Callable[..., Any]) -> bool:
    """Tell whether it is the libraries' base method, which hands its arguments on."""
    plain = unwrapped(function)
    return getattr(plain, "__qualname__", "").startswith("ModelHook.")


def is_strategy(hook: Callable[..., Any]) -> bool:
    """Tell whether a hook is a wrapper's own (DDP, FSDP, DeepSpeed)."""
    plain = unwrapped(hook)
    owner = getattr(hook, "__self__", None)
    homes = (getattr(plain, "__module__", None) or "", type(owner).__module__)
    return any(home.startswith(_STRATEGIES) for home in homes)
