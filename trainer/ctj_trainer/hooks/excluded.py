"""Keep one function out of compiled graphs, and tell whether that was done.

A function that moves weights, casts them or sets a generator must not be traced: the graph would hold the move itself,
or a tensor that is freed before the next call.
"""

import functools
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import nn

_MARK = "_ctj_no_compile"
_ACCELERATE_LAZY = "_compiler_disable.<locals>.wrapper"  # accelerate >= 1.10 delays torch.compiler.disable to a call


@overload
def no_compile(target: None = None, *, reason: str = "") -> Callable[[Any], Any]: ...
@overload
def no_compile(target: nn.Module, *, reason: str = "") -> nn.Module: ...
@overload
def no_compile(target: Callable[..., Any], *, reason: str = "") -> Callable[..., Any]: ...


def no_compile(target: Any = None, *, reason: str = "") -> Any:
    """Exclude a function, with everything it calls, from compilation; as a wrapper or a decorator.

    A module is changed in place and returned: its forward is excluded, its class and its parameters' names stay
    (`torch.compiler.disable(module)` would wrap it and prefix them with `_orig_mod.`).
    """
    if target is None:
        return functools.partial(no_compile, reason=reason)
    if isinstance(target, nn.Module):
        target.forward = no_compile(target.forward, reason=reason)
        return target
    if is_excluded(target):
        return target
    wrapped = torch.compiler.disable(target, reason=reason or "it has side effects (ctj)")  # type: ignore[no-untyped-call]
    setattr(wrapped, _MARK, True)
    return wrapped


def is_excluded(function: Any) -> bool:
    """Tell whether the compiler stays out of `function`, whoever asked for it."""
    while isinstance(function, functools.partial | functools.partialmethod):
        function = function.func
    function = getattr(function, "__func__", function)
    if getattr(function, "_torchdynamo_disable", False) is True:
        return True
    code = getattr(function, "__code__", None)
    return code is not None and code.co_qualname == _ACCELERATE_LAZY
