"""Where is torch.compile placed, per strategy? Called once the blocks are final and before they are wrapped.

In place everywhere: no wrapper, so parameter names stay clean and the strategy's hooks stay on the modules they know.
What must hold is that all hooks are final before the first compiled *call*, and every parameter is managed then.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ctj_api.spec import CompileScope, Dynamic, Strategy
from ctj_trainer.compile.policy import CompilePolicy
from ctj_trainer.hooks.pure import compile_around_hooks

_DYNAMIC = {Dynamic.AUTO: None, Dynamic.STATIC: False, Dynamic.DYNAMIC: True}


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What was compiled and what was not, for the log and the report."""

    scope: CompileScope
    regions: tuple[str, ...] = ()
    eager: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.scope is CompileScope.DISABLED:
            return "nothing is compiled"
        where = f"{len(self.regions)} regions ({self.regions[0]} ...)" if len(self.regions) > 1 else self.regions[0]
        return f"compiled in place: {where}; eager: {', '.join(self.eager) or 'nothing'}"


def place(model: nn.Module, blocks: Sequence[nn.Module], *, policy: CompilePolicy, strategy: Strategy) -> Placement:
    """Compile the blocks, or the whole model, in place. Nothing is traced before the first call.

    The policy has been checked against the installed torch (`installed.py`).
    """
    scope, notices = _effective_scope(blocks, policy.scope, strategy)
    if scope is CompileScope.DISABLED:
        return Placement(scope=scope, notices=notices)
    names = {id(module): name for name, module in model.named_modules()}
    targets = list(blocks) if scope is CompileScope.REGIONAL else [model]
    for target in targets:
        _compile_in_place(target, policy, strategy)
    return Placement(
        scope=scope,
        regions=tuple(names[id(target)] or "the whole model" for target in targets),
        eager=_leftovers(model, targets),
        notices=notices,
    )


def _effective_scope(
    blocks: Sequence[nn.Module], asked: CompileScope, strategy: Strategy
) -> tuple[CompileScope, tuple[str, ...]]:
    """Return the scope that works here, and why it is not the one asked for."""
    if asked is CompileScope.DISABLED:
        return asked, ()
    # Under ZeRO-3 every parameter of a traced module is gathered by a hook: 33 recompiles where blocks have none.
    whole_model_works = strategy is not Strategy.ZERO3
    if asked is CompileScope.FULL and not whole_model_works and blocks:
        return CompileScope.REGIONAL, ("spec.compile.scope full recompiles without end under zero3; compiled by block",)
    if asked is CompileScope.FULL and whole_model_works:
        return asked, ()
    if blocks and not _is_bare_torch(blocks[0]):
        return CompileScope.REGIONAL, ()
    if whole_model_works:
        return CompileScope.FULL, ("no repeated blocks found: the whole model is compiled, which takes longer",)
    return CompileScope.DISABLED, ("no repeated blocks found: under zero3 the model stays eager; give Recipe.blocks",)


def _is_bare_torch(block: nn.Module) -> bool:
    """torch.compile skips frames of torch.nn itself: compiling a bare Linear compiles nothing."""
    return type(block).__module__.startswith("torch.nn.modules")


def _compile_in_place(module: nn.Module, policy: CompilePolicy, strategy: Strategy) -> None:
    if strategy is Strategy.ZERO3:
        # Only the forward, so that DeepSpeed's hooks around the block stay outside the graph.
        module.forward = torch.compile(module.forward, **compile_arguments(policy))
    else:
        compile_around_hooks(module, lambda: compile_arguments(policy))


def compile_arguments(policy: CompilePolicy) -> dict[str, Any]:
    """Build torch.compile's arguments anew for each region: it takes entries out of `options`."""
    arguments: dict[str, Any] = {"backend": policy.backend, "dynamic": _DYNAMIC[policy.dynamic], "fullgraph": False}
    if policy.mode is not None:
        arguments["mode"] = policy.mode
    if policy.options is not None:
        arguments["options"] = dict(policy.options)
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        arguments["recompile_limit"] = policy.recompile_limit
    return arguments


def _leftovers(model: nn.Module, targets: Sequence[nn.Module]) -> tuple[str, ...]:
    """Names of the outermost modules with parameters of their own that no region holds."""
    inside = {id(module) for target in targets for module in target.modules()}
    return tuple(
        name
        for name, module in model.named_modules()
        if id(module) not in inside and next(module.parameters(recurse=False), None) is not None
    )
