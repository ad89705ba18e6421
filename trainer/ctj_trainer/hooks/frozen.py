"""Were hooks added, removed or replaced after the first compiled call?

The compiler does not guard on them: a hook added to a submodule afterwards never fires, one that was removed goes on
firing. So the set is frozen at the first call and compared at every look.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ctj_trainer.hooks.found import is_strategy


@dataclass(frozen=True, kw_only=True)
class FrozenHooks:
    """A digest of each module's hooks, taken right before the first compiled call."""

    digests: dict[str, str]
    roots: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module, *, compiled_roots: frozenset[str] = frozenset()) -> "FrozenHooks":
        """Freeze; `compiled_roots` are the regions' names: hooks on those themselves do fire."""
        return cls(digests=dict(_digests(model)), roots=compiled_roots)

    def changes(self, model: nn.Module) -> list[str]:
        """Return one warning for each module whose hooks are not what they were."""
        now = dict(_digests(model))
        changed = sorted(name for name in now if now[name] != self.digests.get(name, now[name]))
        return [self._warning(name) for name in changed]

    def _warning(self, name: str) -> str:
        what = f"hooks of {name or 'the model'} changed after the first compiled call"
        if name in self.roots:
            return f"{what}: add hooks before it, so that the region is compiled once, with them"
        return f"{what}: a hook added to a submodule now never fires in compiled code; add it before the first step"


def _digests(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        facts = "|".join(_facts(module))
        yield name, hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()


def _facts(module: nn.Module) -> Iterator[str]:
    for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks"):
        for key, hook in getattr(module, kind).items():
            if is_strategy(hook):
                continue
            yield f"{kind}:{key}:{_identity(hook)}"
    for attribute in ("_hf_hook", "_diffusers_hook"):
        if attribute in module.__dict__:
            yield f"{attribute}:{id(module.__dict__[attribute])}"


def _identity(function: Any) -> str:
    return f"{getattr(function, '__qualname__', type(function).__name__)}:{id(getattr(function, '__func__', function))}"
