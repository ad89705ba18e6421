"""Where is torch.compile placed, per strategy? Called once the blocks are final and before they are wrapped.

In place everywhere: no wrapper, so parameter names stay clean and the strategy's hooks stay on the modules they know.
What must hold is that all hooks are final before the first compiled *call*, and every parameter is managed then.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ctj_api.spec import CompileScope, Dynamic, Strategy
from ctj_trainer.compile.blocks import is_one_layer, num_parameters
from ctj_trainer.compile.entry import Role, clean
from ctj_trainer.compile.lengths import Lengths
from ctj_trainer.compile.policy import CompilePolicy

_DYNAMIC = {Dynamic.AUTO: None, Dynamic.STATIC: False, Dynamic.DYNAMIC: True}
_WHOLE = "the whole model"
PAYING_SHARE = 0.01
"""A leftover with less of the parameters than this does not win back the seconds of its compilation."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table at start: modules that are treated alike."""

    names: tuple[str, ...]
    kind: str
    is_compiled: bool
    why: str

    def __str__(self) -> str:
        many = len(self.names) > 2
        names = f"{self.names[0]} to {self.names[-1]} ({len(self.names)})" if many else ", ".join(self.names)
        return f"  {'compiled' if self.is_compiled else 'eager':<8}  {names:<28}  {self.kind:<20}  {self.why}"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What was compiled and what was not, for the log and the report."""

    scope: CompileScope
    rows: tuple[Row, ...] = ()
    notices: tuple[str, ...] = ()

    @property
    def regions(self) -> tuple[str, ...]:
        """Names of what is compiled."""
        return tuple(name for row in self.rows if row.is_compiled for name in row.names)

    @property
    def eager(self) -> tuple[str, ...]:
        """Names of what has parameters and stays eager."""
        return tuple(name for row in self.rows if not row.is_compiled for name in row.names)

    def __str__(self) -> str:
        if not self.regions:
            return "nothing is compiled"
        return "\n".join(["compiled in place:", *map(str, self.rows)])


def place(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    *,
    policy: CompilePolicy,
    strategy: Strategy,
    lengths: Lengths | None = None,
) -> Placement:
    """Compile the blocks and what is left over, or the whole model, in place. Nothing is traced before the first call.

    The policy has been checked against the installed torch (`installed.py`). Settings of torch that the model needs
    are left on: for the process, as torch knows no other way.

    Raises:
        CompileConfigError: a setting of torch contradicts the strategy.
    """
    from ctj_trainer.checks.switches import refuse_compiled_autograd

    refuse_compiled_autograd(strategy)
    scope, notices = _effective_scope(blocks, policy.scope, strategy)
    if scope is CompileScope.DISABLED:
        return Placement(scope=scope, notices=notices)
    placing = _Placing(model, Role(lambda: compile_arguments(policy), lengths=lengths), strategy)
    if scope is CompileScope.FULL:
        placing.compile([model], why="scope full")
    else:
        regions = [block for block in blocks if not is_one_layer(block)]
        placing.compile(regions, why="a repeated block")
        placing.leftovers(model, {id(region) for region in regions})
    notices += _switched_on(model)
    return Placement(scope=scope, rows=tuple(placing.rows), notices=(*notices, *placing.notices))


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


class _Placing:
    """One walk over a model; what it finds goes into rows."""

    def __init__(self, model: nn.Module, role: Role, strategy: Strategy) -> None:
        self._names = {id(module): clean(name) or _WHOLE for name, module in model.named_modules()}
        self._total = num_parameters([model])
        self._role = role
        self._strategy = strategy
        self._found: dict[tuple[str, bool, str], list[str]] = {}
        self.notices: list[str] = []

    @property
    def rows(self) -> Iterator[Row]:
        """One row for all modules of one class and fate."""
        for (kind, is_compiled, why), names in self._found.items():
            yield Row(names=tuple(names), kind=kind, is_compiled=is_compiled, why=why)

    def compile(self, modules: Sequence[nn.Module], *, why: str) -> None:
        """Compile modules in the way of the strategy."""
        for module in modules:
            if self._strategy is Strategy.ZERO3:
                self._role.compile_forward(module)
                self._add(module, is_compiled=True, why=why)
                continue
            hooks = self._role.compile_call(module, name=self._names[id(module)])
            if hooks is not None and hooks.notice:
                self.notices.append(hooks.notice)
            hidden = hooks is not None and not hooks.compiled
            self._add(module, is_compiled=not hidden, why="a hook hides its forward" if hidden else why)

    def leftovers(self, module: nn.Module, regions: set[int]) -> None:
        """Walk what no region holds: compile what has something to fuse, and say why the rest stays eager."""
        for child in module.children():
            if id(child) in regions or not num_parameters([child]):
                continue
            if any(id(inner) in regions for inner in child.modules()):
                self._own_parameters(child)
                self.leftovers(child, regions)
            elif why_eager := self._why_eager(child):
                self._add(child, is_compiled=False, why=why_eager)
            else:
                self.compile([child], why="left over, with layers to fuse")

    def _add(self, module: nn.Module, *, is_compiled: bool, why: str) -> None:
        self._found.setdefault((type(module).__name__, is_compiled, why), []).append(self._names[id(module)])

    def _own_parameters(self, module: nn.Module) -> None:
        if next(module.parameters(recurse=False), None) is not None:
            self._add(module, is_compiled=False, why="its own code between regions")

    def _why_eager(self, module: nn.Module) -> str:
        if next(module.children(), None) is None:
            return "one layer: nothing to fuse"
        if self._strategy is Strategy.ZERO3:
            return "zero3 gathers each of its layers by a hook"
        share = num_parameters([module]) / self._total
        return f"{share:.1%} of the parameters: too little to pay" if share < PAYING_SHARE else ""


def _effective_scope(
    blocks: Sequence[nn.Module], asked: CompileScope, strategy: Strategy
) -> tuple[CompileScope, tuple[str, ...]]:
    """Return the scope that works here, and why it is not the one asked for."""
    if asked is CompileScope.DISABLED:
        return asked, ()
    # Under ZeRO-3 every parameter of a traced module is gathered by a hook: 33 recompiles where blocks have none.
    whole_model_works = strategy is not Strategy.ZERO3
    if asked is CompileScope.FULL and not whole_model_works and blocks:
        return CompileScope.REGIONAL, ("scope full recompiles without end under zero3; compiled by block",)
    if asked is CompileScope.FULL and whole_model_works:
        return asked, ()
    if any(not is_one_layer(block) for block in blocks):
        return CompileScope.REGIONAL, ()
    if whole_model_works:
        return CompileScope.FULL, ("no repeated blocks found: the whole model is compiled, which takes longer",)
    return CompileScope.DISABLED, ("no repeated blocks found: under zero3 the model stays eager; give Recipe.blocks",)


def _switched_on(model: nn.Module) -> tuple[str, ...]:
    """Switch on what the model's kind needs of torch, as Accelerate does for every FSDP2 model."""
    import torch._dynamo.config as dynamo

    said = []
    if _routes_to_experts(model) and not dynamo.capture_scalar_outputs:
        dynamo.capture_scalar_outputs = True
        said.append("capture_scalar_outputs is on: experts get token counts that only the data knows")
    if _recomputes(model) and not dynamo.skip_fwd_side_effects_in_bwd_under_checkpoint:
        dynamo.skip_fwd_side_effects_in_bwd_under_checkpoint = True
        said.append("skip_fwd_side_effects_in_bwd_under_checkpoint is on: activations are computed again in backward")
    return tuple(said)


def _routes_to_experts(model: nn.Module) -> bool:
    texts = (f"{name.rpartition('.')[2]} {type(module).__name__}".lower() for name, module in model.named_modules())
    return any("expert" in text or "moe" in text for text in texts)


def _recomputes(model: nn.Module) -> bool:
    """Whether activations are checkpointed: by a wrapper, by transformers' flag, or inside a forward of ours."""
    return any(
        type(module).__name__ == "CheckpointWrapper"
        or getattr(module, "gradient_checkpointing", False) is True
        or getattr(module.__dict__.get("forward"), "__qualname__", "").startswith("recompute_in_backward")
        for module in model.modules()
    )
