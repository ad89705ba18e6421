"""Compile what a hooked region computes, and leave what its hooks do outside: the moves run eager around the graph.

`module.compile()` would trace the hooks, and each excluded one breaks the graph; a forward that was replaced by an
excluded function would compile to nothing at all. So the original forward inside is compiled instead.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ctj_trainer.compile.blocks import is_bare_torch
from ctj_trainer.hooks.excluded import is_excluded
from ctj_trainer.hooks.found import Family, entry_points

Arguments = Callable[[], dict[str, Any]]
"""Make torch.compile's arguments anew for each call: torch takes entries out of `options`."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where a wrapper keeps the forward it wraps."""

    forward: Callable[..., Any]
    put: Callable[[Callable[..., Any]], None]


@dataclass(frozen=True, kw_only=True)
class PureForm:
    """How a region was compiled around its hooks. `uncompiled`: modules whose original forward was not found."""

    region: str
    compiled: tuple[str, ...] = ()
    kept_eager: tuple[str, ...] = ()
    uncompiled: tuple[str, ...] = ()

    @property
    def notice(self) -> str:
        """One line for the report; empty if there are no hooks."""
        if self.uncompiled:
            return (
                f"{self.region}: not compiled: the forward of {', '.join(self.uncompiled[:3])} was replaced by a hook"
            )
        if self.kept_eager:
            return (
                f"{self.region}: offload hook: kept eager ({', '.join(self.kept_eager)}); its computation is compiled"
            )
        return ""


def compile_around_hooks(region: nn.Module, arguments: Arguments, *, name: str = "") -> PureForm:
    """Compile a region in place, its hooks excluded. Hooks must be final.

    Without hooks it is `region.compile()`; with hooks on submodules, each module between them is compiled by itself.
    """
    hooked = {entry.module for entry in entry_points(region)}
    kinds = tuple(sorted({entry.kind for entry in entry_points(region)}))
    compiled, uncompiled = [], []
    for path, module in _parts(region, hooked):
        slot = inner_forward(module) if path in hooked else None
        label = ".".join(part for part in (name, path) if part) or "the model"
        if path not in hooked:
            module.compile(**arguments())
        elif slot is None:
            uncompiled.append(label)
            continue
        else:
            slot.put(_compiled(module, slot.forward, arguments))
        compiled.append(label)
    return PureForm(
        region=name or "the model", compiled=tuple(compiled), kept_eager=kinds, uncompiled=tuple(uncompiled)
    )


def inner_forward(module: nn.Module) -> Slot | None:
    """Find the computation below the hooks of one module; None if its wrapper hides it."""
    families = {entry.family for entry in entry_points(module) if not entry.module}
    if "_old_forward" in module.__dict__:
        return _slot(module, "_old_forward")
    if Family.DIFFUSERS in families:
        first = module.__dict__["_diffusers_hook"]._fn_refs[0]  # the first hook was put around the original forward
        return _slot(first, "original_forward" if getattr(first, "original_forward", None) else "forward")
    if Family.REPLACED in families:
        return next(_held_by(module.__dict__["forward"], type(module).forward, depth=4), None)
    return _slot(module, "forward")


def _parts(region: nn.Module, hooked: set[str], path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The largest modules that can be compiled whole; between hooked ones the glue stays eager."""
    below = {name for name in hooked if name != path and (not path or name.startswith(f"{path}."))}
    if not below:
        if path in hooked or not path or not is_bare_torch(region):
            yield path, region
        return
    for child_name, child in region.named_children():
        yield from _parts(child, hooked, f"{path}.{child_name}" if path else child_name)


def _slot(owner: Any, attribute: str) -> Slot | None:
    forward = getattr(owner, attribute)
    if is_excluded(forward):
        return None
    return Slot(forward=forward, put=functools.partial(setattr, owner, attribute))


def _compiled(module: nn.Module, forward: Callable[..., Any], arguments: Arguments) -> Callable[..., Any]:
    """The module is an argument of the compiled function, so equal modules share one graph."""
    if getattr(forward, "__func__", None) is type(module).forward:
        shared = torch.compile(_class_forward, **arguments())
        return functools.partial(shared, module)
    return torch.compile(forward, **arguments())


def _class_forward(module: nn.Module, *inputs: Any, **keywords: Any) -> Any:
    return type(module).forward(module, *inputs, **keywords)


def _held_by(function: Any, original: Callable[..., Any], *, depth: int) -> Iterator[Slot]:
    """Search the wrapper's closure, and the objects in it, for the bound original forward."""
    if depth == 0:
        return
    function = getattr(function, "_torchdynamo_orig_callable", function)
    function = function.func if isinstance(function, functools.partial) else getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if getattr(content, "__func__", None) is original:
            yield Slot(forward=content, put=functools.partial(setattr, cell, "cell_contents"))
        elif callable(content) and hasattr(content, "__code__"):
            yield from _held_by(content, original, depth=depth - 1)
        else:
            for attribute, value in getattr(content, "__dict__", {}).items():
                if getattr(value, "__func__", None) is original:
                    yield Slot(forward=value, put=functools.partial(setattr, content, attribute))
