"""Activation-checkpoint functions of other libraries: DeepSpeed's, fairscale's, Megatron's.

They save generator states in forward and restore them for the recomputation. Traced, the recomputation may draw other
dropout masks, and the gradients are silently wrong (deepspeedai/DeepSpeed#6811). torch's own function is safe: the
compiler knows it. Recognised by structure: a module-level function that applies an `autograd.Function` of its own
module whose name says checkpoint.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from ctj_trainer.hooks.excluded import is_excluded, no_compile


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckpointFunction:
    """One checkpoint function that this process has imported."""

    home: str
    name: str
    function: Callable[..., Any]

    @property
    def is_excluded(self) -> bool:
        """Whether the compiler stays out of it."""
        return is_excluded(self.function)

    def exclude(self) -> None:
        """Replace it under every name that a module knows it by (people import it by name)."""
        excluded = no_compile(self.function, reason=f"checkpoint function {self}")
        for module in list(sys.modules.values()):
            names = [name for name, value in vars(module).items() if value is self.function] if module else []
            for name in names:
                setattr(module, name, excluded)

    def __str__(self) -> str:
        return f"checkpoint function {self.home}.{self.name} (restores generator states in backward)"


def checkpoint_functions() -> Iterator[CheckpointFunction]:
    """Return the checkpoint functions of other libraries in this process; imports none."""
    seen = set()
    for recompute in _subclasses(torch.autograd.Function):
        home = recompute.__module__
        if "checkpoint" not in recompute.__name__.lower() or home.split(".")[0] == "torch":
            continue
        for name, value in vars(sys.modules.get(home, object)).items():
            if id(value) not in seen and _applies(value, recompute):
                seen.add(id(value))
                yield CheckpointFunction(home=home, name=name, function=value)


def _subclasses(base: type) -> Iterator[type]:
    children: list[type] = base.__subclasses__()
    for child in children:
        yield child
        yield from _subclasses(child)


def _applies(value: Any, recompute: type) -> bool:
    function = getattr(value, "_torchdynamo_orig_callable", value)
    return (
        isinstance(function, FunctionType)
        and function.__module__ == recompute.__module__
        and recompute.__name__ in function.__code__.co_names
        and "apply" in function.__code__.co_names
    )
