"""Which modules are compiled in place, which source is theirs, and how does one of them become eager again?

Only between optimizer steps, on every rank alike: collectives live in hooks around a region, never in its graph.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import nn

from ctj_trainer.compile.causes import Place
from ctj_trainer.hooks import is_excluded


@dataclass(frozen=True, kw_only=True)
class Region:
    """One compiled module: its compiled call, or, under ZeRO-3, only its compiled forward."""

    name: str
    module: nn.Module
    call: Callable[..., Any] | None
    forward: Callable[..., Any] | None

    def make_eager(self) -> None:
        """Remove the compiled form; hooks and names stay."""
        if self.call is not None:
            self.module._compiled_call_impl = None
        if self.forward is not None:
            self.module.forward = self.forward._torchdynamo_orig_callable  # type: ignore[attr-defined]

    def make_compiled(self) -> None:
        """Put the compiled form back; graphs made before are still there."""
        if self.call is not None:
            self.module._compiled_call_impl = self.call
        if self.forward is not None:
            self.module.forward = self.forward


class CompiledRegions:
    """The regions of one model, in the order of their names in it."""

    def __init__(self, inner: nn.Module) -> None:
        self._regions = {region.name: region for region in _found(inner)}
        self._codes = {name: _codes(region.module) for name, region in self._regions.items()}
        self._eager: set[str] = set()

    @property
    def compiled(self) -> tuple[str, ...]:
        """Names of the regions that run compiled."""
        return tuple(name for name in self._regions if name not in self._eager)

    @property
    def eager(self) -> tuple[str, ...]:
        """Names of the regions that were made eager."""
        return tuple(name for name in self._regions if name in self._eager)

    def alike(self) -> list[tuple[str, ...]]:
        """The compiled regions in groups of the same code: those share their graphs, and their failures."""
        groups: dict[frozenset[CodeType], list[str]] = {}
        for name in self.compiled:
            groups.setdefault(self._codes[name], []).append(name)
        return [tuple(names) for names in groups.values()]

    def owners(self, places: Iterable[Place | None]) -> tuple[str, ...]:
        """The compiled regions these functions belong to; all of them where one belongs to none.

        A failed block is tried again function by function, so an event may name a helper that many regions share next
        to one that is its own: the narrowest say which.
        """
        compiled = self.compiled
        found = [frozenset(name for name in compiled if _holds(self._codes[name], place)) for place in set(places)]
        if not found or not all(found):
            return compiled
        narrowest = [names for names in found if not any(other < names for other in found)]
        return tuple(name for name in compiled if any(name in names for names in narrowest))

    def instances(self, place: Place | None) -> int:
        """How many compiled regions run this function; at least one."""
        return max(1, sum(_holds(self._codes[name], place) for name in self.compiled))

    def make_eager(self, names: Iterable[str]) -> None:
        """Run these regions eager from now on. Names this model does not have are left out."""
        for name in set(names) & self._regions.keys() - self._eager:
            self._regions[name].make_eager()
            self._eager.add(name)

    def forget(self) -> None:
        """Clear torch's entries for the functions of eager regions: graphs are freed, marks of failure are gone."""
        from torch._C._dynamo.eval_frame import reset_code

        kept = {code for name in self.compiled for code in self._codes[name]}
        for code in {code for name in self._eager for code in self._codes[name]} - kept:
            reset_code(code)

    @contextmanager
    def only(self, names: Sequence[str]) -> Iterator[None]:
        """Let these regions alone be compiled for a while."""
        others = [self._regions[name] for name in self.compiled if name not in names]
        for region in others:
            region.make_eager()
        try:
            yield
        finally:
            for region in others:
                region.make_compiled()


def _found(inner: nn.Module) -> Iterator[Region]:
    for name, module in inner.named_modules():
        forward = module.__dict__.get("forward")
        is_wrapped = hasattr(forward, "_torchdynamo_orig_callable") and not is_excluded(forward)
        compiled_forward = forward if is_wrapped else None
        if module._compiled_call_impl is not None or compiled_forward is not None:
            yield Region(
                name=name or "the whole model",
                module=module,
                call=module._compiled_call_impl,
                forward=compiled_forward,
            )


def _codes(module: nn.Module) -> frozenset[CodeType]:
    """The code of every forward inside, whatever wraps it (recomputing, autocast, compile)."""
    codes = set()
    for part in module.modules():
        own = part.__dict__.get("forward")
        for function in (type(part).forward, own, getattr(own, "_torchdynamo_orig_callable", None)):
            code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
            if code is not None:
                codes.add(code)
    return frozenset(codes)


def _holds(codes: Iterable[CodeType], place: Place | None) -> bool:
    """Whether a function begins inside one of them; what Dynamo cuts off after a break begins at the break's line."""
    return place is not None and any(
        code.co_filename == place.file and code.co_firstlineno <= place.line <= _last_line(code) for code in codes
    )


def _last_line(code: CodeType) -> int:
    return max((line for *_, line in code.co_lines() if line is not None), default=code.co_firstlineno)
