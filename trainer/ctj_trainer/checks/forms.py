"""Run a model in one form: eager, compiled, prepared, or both. The process that `isolate` starts does this."""

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from ctj_trainer.checks.boundary import first_line, own_line
from ctj_trainer.checks.group import alone
from ctj_trainer.checks.isolate import Form, Tried
from ctj_trainer.checks.trial import Trial
from ctj_trainer.hooks import OffloadHooks
from ctj_trainer.hooks.found import entry_points
from ctj_trainer.hooks.graphs import GraphLog
from ctj_trainer.hooks.pure import compile_around_hooks

_STEPS = 2


def try_form(trial: Trial, form: Form) -> Tried:
    """Run two steps; an error is an answer."""
    torch._dynamo.reset()
    counters.clear()
    log = GraphLog()
    try:
        with alone():
            loss, gradient = _steps(trial, form, log)
    except Exception as error:
        place = own_line(error)
        return Tried(error=f"{type(error).__name__}: {first_line(error)}" + (f" ({place})" if place else ""))
    breaks = sum(counters["graph_break"].values()) + sum(counters["unimplemented"].values())
    return Tried(loss=loss, gradient=gradient, graphs=len(log.graphs), breaks=breaks)


def without_hooks(model: nn.Module) -> None:
    """Take side-effecting hooks off, as if they had never been attached."""
    hooked = {entry.module for entry in entry_points(model)}
    for name, module in model.named_modules():
        if "_hf_hook" in module.__dict__:
            from accelerate.hooks import remove_hook_from_module

            remove_hook_from_module(module)
        if name in hooked:
            for attribute in ("forward", "_diffusers_hook"):
                module.__dict__.pop(attribute, None)
            module._forward_pre_hooks.clear()
            module._forward_hooks.clear()


def _steps(trial: Trial, form: Form, log: GraphLog) -> tuple[float, float]:
    model = trial.build()
    if form in (Form.EAGER, Form.COMPILED):
        without_hooks(model)
    regions = trial.blocks(model) or [model]
    if form is Form.APART:
        OffloadHooks.of(model).exclude_all()
        for region in regions:
            compile_around_hooks(region, lambda: {"backend": log})
    elif form in (Form.COMPILED, Form.BOTH):
        for region in regions:
            region.compile(backend=log)
    trains = any(p.requires_grad for p in model.parameters())
    is_prepared = form not in (Form.EAGER, Form.COMPILED) and trains
    called = DistributedDataParallel(model) if is_prepared else model
    total = 0.0
    for _ in range(_STEPS):
        loss = trial.loss(called)
        total += float(loss.detach())
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return total, float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
