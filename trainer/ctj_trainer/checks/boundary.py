"""Static-graph readiness, step 3: the model has a graph. Traced three ways: fake tensors, export, and capture."""

import traceback
from typing import Any

import torch
from torch import nn

from ctj_trainer.checks.finding import Finding, Rule
from ctj_trainer.checks.trial import Trial

SHAPES = Rule(check="static-graph", name="shape inference is traceable")
EXPORT = Rule(check="static-graph", name="the graph's boundary is exportable (torch.export)")
CAPTURE = Rule(check="static-graph", name="one graph, without breaks")
MAX_BREAKS = 4


def check_boundary(trial: Trial) -> list[Finding]:
    """Trace the model each way; nothing is compiled."""
    return [*check_shape_inference(trial), *check_export(trial), *check_capture(trial)]


def check_shape_inference(trial: Trial) -> list[Finding]:
    """Run the model on tensors without contents: what fails here has a shape or a branch that depends on data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = trial.build()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode, torch.no_grad():
            faked = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, (trial.arguments, trial.keywords))
            model(*faked[0], **faked[1])
    except Exception as error:
        return [
            SHAPES.fails(
                type(model).__name__,
                location=own_line(error),
                evidence=f"{type(error).__name__}: {first_line(error)}",
                remedy="keep shapes free of data; register a fake for an operator of your own "
                "(torch.library.register_fake)",
            )
        ]
    return [SHAPES.holds(type(model).__name__, evidence="the forward ran on fake tensors")]


def check_export(trial: Trial) -> list[Finding]:
    """Export the forward: inputs and outputs are tensors and plain containers, and nothing outside is touched."""
    model = trial.build()
    try:
        torch.export.export(model, trial.arguments, dict(trial.keywords), strict=False)
    except Exception as error:
        return [
            EXPORT.fails(
                type(model).__name__,
                location=own_line(error),
                evidence=f"{type(error).__name__}: {first_line(error)}",
                remedy="make forward a function of tensors: data-dependent code outside of it, or as torch.cond/vmap",
            )
        ]
    return [EXPORT.holds(type(model).__name__, evidence="torch.export.export succeeded")]


def check_capture(trial: Trial) -> list[Finding]:
    """Let the compiler capture the forward, and report each place where the graph ends."""
    torch._dynamo.reset()
    model = trial.build()
    try:
        with torch.no_grad():
            explained = torch._dynamo.explain(model)(*trial.arguments, **trial.keywords)
    except Exception as error:
        return [CAPTURE.fails(type(model).__name__, evidence=first_line(error), remedy="see the other findings")]
    finally:
        torch._dynamo.reset()
    if explained.graph_count == 0:
        return [
            CAPTURE.fails(
                type(model).__name__,
                evidence="0 graphs: nothing would be compiled, silently",
                remedy="the blocks are bare torch.nn containers, disabled, or their forward was replaced by a hook",
            )
        ]
    breaks = [_break(model, reason) for reason in explained.break_reasons[:MAX_BREAKS]]
    return CAPTURE.judge(breaks, looked_at=f"{explained.graph_count} graph, {explained.op_count} operations")


def first_line(error: BaseException) -> str:
    """Return an error's first line that says something, cut to 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__


def own_line(error: BaseException) -> str:
    """Return `file:line` of the innermost frame that is neither torch's nor ours."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_foreign(f.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _break(model: nn.Module, reason: Any) -> Finding:
    frame = reason.user_stack[-1] if reason.user_stack else None
    text = " ".join(str(reason.reason).split())
    return CAPTURE.fails(
        type(model).__name__,
        location=f"{frame.filename}:{frame.lineno}" if frame else "",
        evidence=f"the graph ends here: {text[:200]}",
        remedy="see the finding for this line, or keep the call out: ctj_trainer.hooks.no_compile",
    )


def _is_foreign(file: str) -> bool:
    return any(part in file for part in ("/torch/", "/ctj_trainer/checks/", "<frozen", "<string>"))
