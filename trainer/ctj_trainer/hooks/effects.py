"""What does a function do besides computing? Read from its code, without running it.

Only names are seen: a hook that hides its work behind a C extension is not recognised; decorate it with `no_compile`.
"""

import functools
from collections.abc import Callable, Iterator
from enum import StrEnum
from types import CodeType, FunctionType
from typing import Any


class Effect(StrEnum):
    """A side effect that a graph must not hold."""

    MOVES = "moves or casts tensors"
    RANDOM = "sets or forks a random generator"
    STREAMS = "waits for a stream or empties a cache"


_NAMES = {
    Effect.MOVES: {"to", "cpu", "cuda", "npu", "xpu", "pin_memory", "record_stream", "send_to_device"}
    | {"set_module_tensor_to_device", "move_data_to_device", "onload_", "offload_", "to_empty", "resize_", "set_"},
    Effect.RANDOM: {"manual_seed", "manual_seed_all", "seed_all", "set_rng_state", "set_rng_state_all", "fork_rng"}
    | {"get_rng_state", "synchronize_rng_states", "get_cuda_rng_tracker", "set_state"},
    Effect.STREAMS: {"wait_stream", "synchronize", "empty_cache", "clear_device_cache"},
}
_DEPTH = 3  # a hook, its helper, and the helper's helper


def effects_of(function: Callable[..., Any]) -> frozenset[Effect]:
    """Return the side effects that the code of `function`, or of what it calls by name, shows."""
    names = {name for code in _codes(function, _DEPTH) for name in code.co_names}
    return frozenset(effect for effect, telling in _NAMES.items() if names & telling)


def _codes(function: Any, depth: int) -> Iterator[CodeType]:
    owner = getattr(function, "__self__", None)
    plain = unwrapped(function)
    if not isinstance(plain, FunctionType) or depth == 0:
        return
    for code in _nested(plain.__code__):
        yield code
        for name in code.co_names:
            for called in (plain.__globals__.get(name), getattr(type(owner), name, None)):
                if isinstance(unwrapped(called), FunctionType) and not _is_torch(called):
                    yield from _codes(called if owner is None else getattr(owner, name, called), depth - 1)


def unwrapped(function: Any) -> Any:
    """Return the function below partials, bound methods and functools.wraps."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__func__"):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return function


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _is_torch(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).split(".")[0] == "torch"
