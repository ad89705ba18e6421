"""At which of a module's calls does compiled code begin, and is it there? In place: no wrapper, no other name.

Hooks run outside of the compiled frame, whoever installs them: FSDP's gather, DeepSpeed's. Names, `state_dict` and
classes stay as they were; a deep copy is not compiled.
"""

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ctj_trainer.compile.blocks import is_bare_torch
from ctj_trainer.compile.lengths import Lengths
from ctj_trainer.hooks import is_excluded
from ctj_trainer.hooks.found import entry_points
from ctj_trainer.hooks.pure import PureForm, compile_around_hooks

Arguments = Callable[[], dict[str, Any]]
"""Make torch.compile's arguments anew for each call: torch takes entries out of `options`."""

_MARK = "_torchdynamo_orig_callable"
"""What torch.compile puts on a function, and where it keeps the one it was made of."""

# What was compiled here; a copy of a module is not in it, as it is not compiled.
_PLACED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
_AROUND_HOOKS: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


class Role:
    """What is compiled for one purpose (the model in training): its modules share graphs and one recompile budget.

    Each call of torch.compile begins a budget of its own, so there is one for all. Another role's storm, such as that
    of a reference model of the same classes, does not use it up.
    """

    def __init__(self, arguments: Arguments, *, lengths: Lengths | None = None) -> None:
        self._arguments = arguments
        # torch skips frames of its own files: hooks run before it comes to the forward of the module's class.
        self._call = self._compiled(nn.Module._call_impl)
        self._call_bare = self._compiled(_call_bare)
        if lengths is not None:
            self._call, self._call_bare = lengths.marking(self._call), lengths.marking(self._call_bare)

    def compile_call(self, module: nn.Module, *, name: str = "") -> PureForm | None:
        """Compile what a call of `module` computes; around its hooks, if it has such that must not be traced."""
        _PLACED.add(module)
        if entry_points(module):
            _AROUND_HOOKS.add(module)
            return compile_around_hooks(module, self._arguments, name=name)
        module._compiled_call_impl = types.MethodType(self._call_bare if is_bare_torch(module) else self._call, module)
        return None

    def compile_forward(self, module: nn.Module) -> None:
        """Compile only `forward`, for hooks that must never be near a graph (DeepSpeed's)."""
        _PLACED.add(module)
        forward = module.forward
        if is_bare_torch(module):
            module.forward = functools.partial(self._compiled(_call_forward), forward)
            setattr(module.forward, _MARK, forward)
        else:
            module.forward = torch.compile(forward, **self._arguments())

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        arguments = self._arguments()
        if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
            arguments["isolate_recompiles"] = True
        return torch.compile(function, **arguments)


def compiled_regions(model: nn.Module) -> list[str]:
    """Return the names of what is compiled, in place or by a wrapper, without the wrappers' prefixes.

    Accelerate's `is_compiled_module` and `has_compiled_regions` know wrappers only.
    """
    return [clean(name) for name, module in model.named_modules() if _is_region(module)]


def is_compiled(model: nn.Module) -> bool:
    """Whether any part of the model is compiled."""
    return any(_is_region(module) for module in model.modules())


def uncaptured(model: nn.Module) -> list[str]:
    """Return the regions of which no graph exists although they were called: ask after the first compiled step."""
    # What is below hooks and was not found was said when it was placed.
    asked = ((name, module) for name, module in model.named_modules() if module in _PLACED - _AROUND_HOOKS)
    return [clean(name) for name, module in asked if not _has_graph(module)]


def unwrapped(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """Undo what somebody else compiled: wrappers are taken off, in place below the root; in-place calls are reset.

    Returns the model and the names of what was undone.
    """
    undone = ["the whole model"] if original(model) is not model else []
    model = original(model)
    for name, module in list(model.named_modules()):
        for child_name, child in list(module.named_children()):
            if original(child) is not child:
                setattr(module, child_name, original(child))
                undone.append(clean(f"{name}.{child_name}"))
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None and module not in _PLACED:
            module._compiled_call_impl = None
            undone.append(clean(name) or "the whole model")
    return model, list(dict.fromkeys(undone))


def original(module: nn.Module) -> nn.Module:
    """Return what a wrapper of torch.compile, or a copy by Accelerate's `compile_regions`, was made of; else itself."""
    kept = module._modules.get("_orig_mod") if _is_wrapper(module) else module.__dict__.get("_orig_mod")
    return original(kept) if isinstance(kept, nn.Module) else module


def clean(name: str) -> str:
    """Return a module's name without what wrappers put before it."""
    parts = [part for part in name.split(".") if part and part != "_orig_mod"]
    return ".".join(parts[1:] if parts[:1] == ["module"] else parts)


def _call_bare(module: nn.Module, *inputs: Any, **keywords: Any) -> Any:
    """A frame of ours around a module of torch, whose own frames the compiler skips."""
    return module._call_impl(*inputs, **keywords)  # type: ignore[no-untyped-call]


def _call_forward(forward: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
    return forward(*inputs, **keywords)


def _is_wrapper(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules


def _is_region(module: nn.Module) -> bool:
    if module in _AROUND_HOOKS:
        return True
    forward = module.__dict__.get("forward")
    if is_excluded(forward):
        return False  # hidden later, by a hook: its call is compiled, and nothing is in it
    return _is_wrapper(module) or module._compiled_call_impl is not None or hasattr(forward, _MARK)


def _has_graph(module: nn.Module) -> bool:
    from torch._dynamo.eval_frame import _get_total_cache_entry_count

    codes = [_call_bare.__code__] if is_bare_torch(module) else list(_codes(module.forward))
    return any(_get_total_cache_entry_count(code) for code in codes)


def _codes(function: Any) -> Iterator[types.CodeType]:
    """The code of a function and of those it wraps."""
    while function is not None:
        function = getattr(function, "__func__", function)
        if isinstance(function, types.FunctionType):
            yield function.__code__
        function = getattr(function, _MARK, None) or getattr(function, "__wrapped__", None)
