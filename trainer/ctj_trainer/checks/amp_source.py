"""AMP rules that are read from code: nested and hand-entered autocast, and constants fixed in one dtype."""

import ast
from collections.abc import Iterator

import torch
from torch import nn

from ctj_trainer.checks.finding import Finding, Rule
from ctj_trainer.checks.source import Source, calls, dotted, text

NESTED = Rule(check="amp", name="autocast is entered once, around the whole forward")
BY_HAND = Rule(check="amp", name="autocast is a with block or a decorator, never entered by hand")
CONSTANTS = Rule(check="amp", name="no constant is fixed in a dtype of its own")
STORED = Rule(check="amp", name="weights and buffers have one floating dtype")

_HALF = {"torch.float16", "torch.half", "torch.bfloat16"}
_FP16_MAX, _FP16_TINY = 65504.0, 5.96e-8


def check_autocast(sources: list[Source], *, compute_dtype: torch.dtype = torch.float32) -> list[Finding]:
    """Judge code; `compute_dtype` is what the forward will run in (constants must fit it)."""
    looked_at = f"{len(sources)} functions read"
    nested = [finding for source in sources for finding in _nested(source)]
    by_hand = [finding for source in sources for finding in _by_hand(source)]
    constants = [finding for source in sources for finding in _constants(source, compute_dtype)]
    return [
        *NESTED.judge(nested, looked_at=looked_at),
        *BY_HAND.judge(by_hand, looked_at=looked_at),
        *CONSTANTS.judge(constants, looked_at=looked_at),
    ]


def check_stored_dtypes(model: nn.Module) -> list[Finding]:
    """Name parameters and buffers whose floating dtype is not the model's most frequent one."""
    tensors = [(n, t) for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_floating_point()]
    if not tensors:
        return [STORED.does_not_apply(evidence="the model has no floating tensors")]
    sizes: dict[torch.dtype, int] = {}
    for _, tensor in tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    usual = max(sizes, key=lambda dtype: sizes[dtype])
    odd = [
        STORED.fails(
            name,
            evidence=f"{tensor.dtype} where the model is {usual}",
            remedy=f"store it as {usual} and let autocast choose: sharding needs one dtype, and a graph keeps the cast",
            rewrite=f"{name}.to({usual})",
        )
        for name, tensor in tensors
        if tensor.dtype is not usual
    ]
    return STORED.judge(odd, looked_at=f"{len(tensors)} tensors, all {usual}")


def _nested(source: Source) -> Iterator[Finding]:
    """Inside another autocast block, or switched off inside a forward that runs under autocast."""
    for node in ast.walk(source.node):
        entered = [item.context_expr for item in getattr(node, "items", ()) if _is_autocast(item.context_expr)]
        for call in entered:
            around = [outer for outer in source.above(node) if _enters_autocast(outer)]
            switched_off = any(k.arg == "enabled" and text(k.value) == "False" for k in call.keywords)
            if around or switched_off:
                why = "its backward is traced under the outer autocast" if switched_off else "autocast inside autocast"
                yield NESTED.fails(
                    source.subject,
                    location=source.at(call),
                    evidence=f"`with {text(call)}`: {why}; compiled gradients differ from eager ones without an error",
                    remedy="cast explicitly instead (x.float() before, .to(dtype) after), or keep this module eager: "
                    "ctj_trainer.hooks.no_compile(module)",
                )


def _by_hand(source: Source) -> Iterator[Finding]:
    for name, call in calls(source.node):
        method = name.rsplit(".", 1)[-1]
        if method in {
            "set_autocast_enabled",
            "set_autocast_dtype",
            "set_autocast_cpu_enabled",
            "set_autocast_gpu_dtype",
        }:
            how = "sets autocast for the whole process"
        elif method == "__enter__" and _mentions_autocast(source, call):
            how = "enters autocast by hand"
        elif method == "enter_context" and any(_is_autocast(argument) for argument in call.args):
            how = "enters autocast on a stack"
        else:
            continue
        yield BY_HAND.fails(
            source.subject,
            location=source.at(call),
            evidence=f"`{text(call)}` {how}: inside a region the compiler cannot see where it ends",
            remedy="use a with block around the whole model call",
            rewrite="with torch.autocast(device_type, dtype=torch.bfloat16): output = model(batch)",
        )


def _constants(source: Source, compute_dtype: torch.dtype) -> Iterator[Finding]:
    for name, call in calls(source.node):
        method = name.rsplit(".", 1)[-1]
        dtype = next((text(k.value) for k in call.keywords if k.arg == "dtype"), "")
        fixed = method in {"tensor", "full", "ones", "zeros", "scalar_tensor", "arange"} and dtype in _HALF
        if fixed or (method in {"half", "bfloat16"} and not call.args and isinstance(call.func, ast.Attribute)):
            yield CONSTANTS.fails(
                source.subject,
                location=source.at(call),
                evidence=f"`{text(call)}` is {dtype or method} whatever the precision of the run is",
                remedy="take the dtype of the tensor it meets",
                rewrite=text(call).replace(dtype, "x.dtype") if dtype else f"{text(call.func.value)}.to(x.dtype)",  # type: ignore[attr-defined]
            )
        elif compute_dtype is torch.float16 and method in {
            "masked_fill",
            "masked_fill_",
            "full_like",
            "clamp",
            "where",
        }:
            yield from _out_of_range(source, call)


def _out_of_range(source: Source, call: ast.Call) -> Iterator[Finding]:
    for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
        value = _number(argument)
        if value is not None and (abs(value) > _FP16_MAX or 0 < abs(value) < _FP16_TINY):
            yield CONSTANTS.fails(
                source.subject,
                location=source.at(call),
                evidence=f"{value:g} in `{text(call)}` does not exist in fp16 (largest 65504, smallest 6e-8)",
                remedy="take the limit of the dtype it meets",
                rewrite=text(call).replace(text(argument), "torch.finfo(x.dtype).min" if value < 0 else "eps"),
            )


def _number(node: ast.AST) -> float | None:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
    is_number = (
        isinstance(value, int | float) and not isinstance(value, bool) and value not in (float("inf"), -float("inf"))
    )
    return float(value) if is_number else None


def _is_autocast(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and dotted(node.func).rsplit(".", 1)[-1] in {"autocast", "autocast_mode"}


def _enters_autocast(node: ast.AST) -> bool:
    decorators = getattr(node, "decorator_list", ())
    items = [item.context_expr for item in getattr(node, "items", ())]
    return any(_is_autocast(entered) for entered in [*items, *decorators])


def _mentions_autocast(source: Source, call: ast.Call) -> bool:
    """Tell whether the object entered is an autocast, here or where it was assigned."""
    assert isinstance(call.func, ast.Attribute)
    owner = call.func.value
    if _is_autocast(owner):
        return True
    assigned = (n for n in ast.walk(source.node) if isinstance(n, ast.Assign) and _is_autocast(n.value))
    return "autocast" in text(owner) or any(text(target) == text(owner) for n in assigned for target in n.targets)
