"""Rules for training scripts, read and never run: order of compile and prepare, gradient scaler, accumulation."""

import ast
from collections.abc import Iterator

from ctj_trainer.checks.finding import Finding, Rule
from ctj_trainer.checks.source import Source, calls, dotted, text

ORDER = Rule(check="compile", name="the model is prepared before it is compiled")
DYNAMIC = Rule(check="compile", name="changing shapes are tolerated (dynamic is not False)")
FULLGRAPH = Rule(check="compile", name="fullgraph is off")
SAFE = Rule(check="compile", name="compilation goes through safe_compile_with_accelerate")
SCALER = Rule(check="amp", name="scale, backward, unscale, clip, step, update: in this order")
NO_SYNC = Rule(check="ddp", name="gradients are synchronised once per optimizer step")

_SAFE_HELPER = "safe_compile_with_accelerate"


def check_script(script: Source) -> list[Finding]:
    """Judge a training script."""
    return [*check_compile_order(script), *check_scaler(script), *check_accumulation(script)]


def check_compile_order(script: Source) -> list[Finding]:
    """Judge how a script compiles: the questions of the list "compile with Accelerate"."""
    compiled = [
        (n, c) for n, c in calls(script.node) if n == "torch.compile" or (n.endswith(".compile") and _is_model(n))
    ]
    safe = any(name.endswith(_SAFE_HELPER) for name, _ in calls(script.node))
    if not compiled:
        rules = (ORDER, DYNAMIC, FULLGRAPH)
        findings = [rule.does_not_apply(evidence="the script calls no torch.compile") for rule in rules]
        return [*findings, SAFE.holds(evidence="it is called") if safe else SAFE.does_not_apply(evidence="no compile")]
    prepared = [call for name, call in calls(script.node) if name.endswith(".prepare") or name in _WRAPPERS]
    early = [f for name, c in compiled if name == "torch.compile" for p in prepared if (f := _early(script, c, p))]
    static = [_static(script, call) for _, call in compiled if _keyword(call, "dynamic") == "False"]
    full = [_full(script, call) for _, call in compiled if _keyword(call, "fullgraph") == "True"]
    return [
        *(
            ORDER.judge(early[:1], looked_at="compile comes after")
            if prepared
            else [ORDER.does_not_apply(evidence="no prepare")]
        ),
        *DYNAMIC.judge(static, looked_at=f"{len(compiled)} calls"),
        *FULLGRAPH.judge(full, looked_at=f"{len(compiled)} calls"),
        *([SAFE.holds(evidence="it is called")] if safe else [_unsafe(script, compiled[0][1])]),
    ]


def check_scaler(script: Source) -> list[Finding]:
    """Judge the order in which a script uses its gradient scaler."""
    scalers = _assigned_from(script, "GradScaler")
    if not scalers:
        return [SCALER.does_not_apply(evidence="no GradScaler")]
    return SCALER.judge(list(_scaler_failures(script, scalers)), looked_at=f"{', '.join(sorted(scalers))} in order")


def check_accumulation(script: Source) -> list[Finding]:
    """Judge whether micro batches but the last skip the gradient sync, and the forward is inside too."""
    wraps = any(name.endswith(("DistributedDataParallel", "DDP")) for name, _ in calls(script.node))
    accumulates = [n for n in ast.walk(script.node) if isinstance(n, ast.If) and _is_modulo(n.test)]
    blocks = [n for n in ast.walk(script.node) if isinstance(n, ast.With) and _enters(n, (".no_sync", ".accumulate"))]
    if not wraps or not (accumulates or blocks):
        return [NO_SYNC.does_not_apply(evidence="no DDP with accumulation")]
    if not blocks:
        return [
            NO_SYNC.fails(
                script.subject,
                location=script.at(accumulates[0]),
                evidence=f"`if {text(accumulates[0].test)}` accumulates, but every backward reduces gradients",
                remedy="wrap forward and backward of all micro batches but the last in model.no_sync()",
                rewrite="with nullcontext() if last else model.no_sync(): loss = model(batch); loss.backward()",
            )
        ]
    outside = [
        NO_SYNC.fails(
            script.subject,
            location=script.at(block),
            evidence="only the backward is inside no_sync(): DDP decides in forward, so it reduces all the same",
            remedy="put the forward into the block too",
        )
        for block in blocks
        if _has_backward(block) and not _has_forward(block)
    ]
    return NO_SYNC.judge(outside, looked_at=f"{len(blocks)} blocks with forward and backward inside")


_WRAPPERS = {"DistributedDataParallel", "DDP", "fully_shard", "FSDP"}


def _early(script: Source, compiled: ast.Call, prepare: ast.Call) -> Finding | None:
    if compiled.lineno > prepare.lineno:
        return None
    return ORDER.fails(
        script.subject,
        location=script.at(compiled),
        evidence=f"`{text(compiled)}` runs before `{text(prepare)}` (line {prepare.lineno}): hooks and "
        "wrappers that come later are not in the graph, or break it",
        remedy="prepare first, then compile with dynamic=None",
        rewrite=f"model = {text(prepare)}; model = torch.compile(model, dynamic=None)",
    )


def _static(script: Source, call: ast.Call) -> Finding:
    return DYNAMIC.fails(
        script.subject,
        location=script.at(call),
        evidence="dynamic=False compiles anew for every input length, up to the limit",
        remedy="leave dynamic at None, or pad to fixed lengths",
        rewrite=text(call).replace("dynamic=False", "dynamic=None"),
    )


def _full(script: Source, call: ast.Call) -> Finding:
    return FULLGRAPH.fails(
        script.subject,
        location=script.at(call),
        evidence="fullgraph=True turns every break into an error, also under DDP and with hooks",
        remedy="verify it once (`ctj check`) and train with fullgraph off",
        rewrite=text(call).replace("fullgraph=True", "fullgraph=False"),
    )


def _unsafe(script: Source, call: ast.Call) -> Finding:
    return SAFE.fails(
        script.subject,
        location=script.at(call),
        evidence=f"`{text(call)}`: no recompile cap, no fallback, no order check",
        remedy="call safe_compile_with_accelerate instead",
        rewrite="model = safe_compile_with_accelerate(accelerator, model, policy)",
    )


def _scaler_failures(script: Source, scalers: set[str]) -> Iterator[Finding]:
    optimizers = {text(c.args[0]) for n, c in calls(script.node) if _of(n, scalers) == "step" and c.args}
    optimizers |= _assigned_from(script, "AdamW", "Adam", "SGD")
    events = [(kind, call) for name, call in calls(script.node) if (kind := _event(name, call, scalers, optimizers))]
    kinds = [kind for kind, _ in events]
    first = dict(reversed(events))
    if "backward" in first:
        yield _scaler(
            script,
            first["backward"],
            "backward of an unscaled loss: small gradients become zero in fp16",
            "scaler.scale(loss).backward()",
        )
    if "optimizer step" in first:
        yield _scaler(
            script,
            first["optimizer step"],
            "the optimizer steps on scaled gradients, also on inf and NaN",
            "scaler.step(optimizer)",
        )
    if "clip" in first and ("unscale_" not in kinds or kinds.index("clip") < kinds.index("unscale_")):
        yield _scaler(
            script,
            first["clip"],
            "clips scaled gradients: the limit means nothing",
            "scaler.unscale_(optimizer) before it",
        )
    if "step" in first and ("update" not in kinds or kinds.index("update") < kinds.index("step")):
        yield _scaler(script, first["step"], "no update() after it: the scale never adapts", "scaler.update() after it")


def _scaler(script: Source, call: ast.Call, evidence: str, rewrite: str) -> Finding:
    return SCALER.fails(
        script.subject,
        location=script.at(call),
        evidence=f"`{text(call)}`: {evidence}",
        remedy="keep the order scale, backward, unscale_, clip, step, update",
        rewrite=rewrite,
    )


def _event(name: str, call: ast.Call, scalers: set[str], optimizers: set[str]) -> str:
    method = _of(name, scalers)
    if method in {"unscale_", "step", "update"}:
        return method
    if name.endswith("clip_grad_norm_") or name.endswith("clip_grad_value_"):
        return "clip"
    if name.endswith(".backward"):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else call
        scaled = any(_of(n, scalers) == "scale" for n, _ in calls(owner)) or _is_scaled_name(owner)
        return "" if scaled else "backward"
    if name.endswith(".step") and name.removesuffix(".step") in optimizers:
        return "optimizer step"
    return ""


def _is_scaled_name(owner: ast.AST) -> bool:
    return isinstance(owner, ast.Name) and "scaled" in owner.id


def _of(name: str, owners: set[str]) -> str:
    owner, _, method = name.rpartition(".")
    return method if owner in owners else ""


def _assigned_from(script: Source, *classes: str) -> set[str]:
    return {
        text(target)
        for node in ast.walk(script.node)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and dotted(node.value.func).rsplit(".", 1)[-1] in classes
        for target in node.targets
    }


def _keyword(call: ast.Call, name: str) -> str:
    return next((text(keyword.value) for keyword in call.keywords if keyword.arg == name), "")


def _is_model(name: str) -> bool:
    return any(part in name.lower() for part in ("model", "block", "layer", "net"))


def _is_modulo(test: ast.AST) -> bool:
    return any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) for node in ast.walk(test)) and any(
        "accum" in node.id.lower() for node in ast.walk(test) if isinstance(node, ast.Name)
    )


def _enters(node: ast.With, methods: tuple[str, ...]) -> bool:
    return any(name.endswith(methods) for item in node.items for name, _ in calls(item.context_expr))


def _has_backward(block: ast.With) -> bool:
    return any(name.endswith(".backward") for name, _ in calls(block))


def _has_forward(block: ast.With) -> bool:
    inside = [call for statement in block.body for call in calls(statement)]
    return any(_is_model(name) and not name.endswith((".no_sync", ".backward", ".accumulate")) for name, _ in inside)
