"""Static-graph readiness, step 2: the set of parameters and buffers, and the module's own state, stay as they are."""

import ast
import hashlib
from collections.abc import Callable, Iterator

from torch import nn

from ctj_trainer.checks.finding import Finding, Rule
from ctj_trainer.checks.source import Source, calls, text

REGISTRATION = Rule(check="static-graph", name="nothing is registered while the model runs")
ATTRIBUTES = Rule(check="static-graph", name="forward changes no attribute of its module")
NAMES = Rule(check="static-graph", name="parameter names are stable")

_REGISTERS = {"register_buffer", "register_parameter", "register_module", "add_module", "register_forward_hook"}
_REGISTERS |= {"register_forward_pre_hook", "setattr"}


def check_topology(sources: list[Source]) -> list[Finding]:
    """Judge what forward code does to its own module."""
    registered = [finding for source in sources for finding in _registrations(source)]
    changed = [finding for source in sources for finding in _attribute_changes(source)]
    looked_at = f"{len(sources)} functions read"
    return [*REGISTRATION.judge(registered, looked_at=looked_at), *ATTRIBUTES.judge(changed, looked_at=looked_at)]


def check_names(build: Callable[[], nn.Module], run: Callable[[nn.Module], object]) -> list[Finding]:
    """Compare parameter and buffer names of two builds, and before and after a run."""
    first, second = build(), build()
    if names_digest(first) != names_digest(second):
        return [
            NAMES.fails(
                evidence=f"two builds of the model differ in {_first_difference(first, second)}",
                remedy="name and order modules without counters, ids or sets: checkpoints and ranks match by name",
            )
        ]
    before = _names(first)
    run(first)
    appeared = [name for name in _names(first) if name not in before] or sorted(set(before) - set(_names(first)))
    if appeared:
        return [
            NAMES.fails(
                appeared[0],
                evidence=f"{len(appeared)} names changed by the first forward (LazyModule, or registered at run time)",
                remedy="materialise in __init__: an optimizer, a wrapper and a graph know only what was there before",
            )
        ]
    return [NAMES.holds(evidence=f"{len(before)} names, digest {names_digest(second)}, equal in two builds and a run")]


def names_digest(model: nn.Module) -> str:
    """Return a short digest of the names, shapes and order of parameters and buffers."""
    return hashlib.blake2b("\n".join(_names(model)).encode(), digest_size=8).hexdigest()


def _names(model: nn.Module) -> list[str]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [f"{name}:{_shape(tensor)}" for name, tensor in tensors]


def _shape(tensor: object) -> str:
    return (
        "uninitialised" if isinstance(tensor, nn.UninitializedParameter) else str(tuple(getattr(tensor, "shape", ())))
    )


def _first_difference(first: nn.Module, second: nn.Module) -> str:
    pairs = zip([*_names(first), "nothing"], [*_names(second), "nothing"], strict=False)
    return next((f"{one} and {other}" for one, other in pairs if one != other), "their number")


def _registrations(source: Source) -> Iterator[Finding]:
    for name, call in calls(source.node):
        owner, _, method = name.rpartition(".")
        on_self = owner.split(".")[0] == "self" or (method == "setattr" and call.args and text(call.args[0]) == "self")
        if method in _REGISTERS and on_self:
            yield REGISTRATION.fails(
                source.subject,
                location=source.at(call),
                evidence=f"`{text(call)}` runs in forward: optimizer, wrapper and graph do not know the new tensor",
                remedy="register it in __init__ and fill it in forward",
                rewrite=f"in __init__: {text(call)}; in forward: self.NAME.copy_(value)",
            )
    for target, value in _assignments(source):
        if isinstance(value, ast.Call) and text(value.func).split(".")[-1] in {"Parameter", "Linear", "ModuleList"}:
            yield REGISTRATION.fails(
                source.subject,
                location=source.at(target),
                evidence=f"`{text(target)} = {text(value)}` makes a parameter or module in forward",
                remedy="make it in __init__: an optimizer never updates one that is made anew in each step",
            )


def _attribute_changes(source: Source) -> Iterator[Finding]:
    for target, value in _assignments(source):
        is_counter = isinstance(value, ast.AugAssign)
        yield ATTRIBUTES.fails(
            source.subject,
            location=source.at(target),
            evidence=f"forward sets `{text(target)}`: "
            + ("a number that changes is a new graph for every value" if is_counter else "the graph guards on it"),
            remedy="keep it as a buffer and change it in place, or set it outside of forward",
            rewrite=f"self.register_buffer({text(target).removeprefix('self.')!r}, torch.zeros(())) in __init__; "
            f"{text(target)}.add_(1)"
            if is_counter
            else "",
        )


def _assignments(source: Source) -> Iterator[tuple[ast.AST, ast.AST]]:
    for node in ast.walk(source.node):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.AnnAssign) and node.value is not None):
            targets, value = [node.target], node  # type: ignore[assignment]
        for target in targets:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                yield target, value
