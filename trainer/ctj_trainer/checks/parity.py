"""Checks that compare gradients: autocast inside a region, and dropout under a reduced activation memory budget."""

import torch
import torch._functorch.config as functorch
from torch import Tensor, nn

from ctj_trainer.checks.amp_source import check_autocast
from ctj_trainer.checks.finding import Finding, Rule, violations
from ctj_trainer.checks.source import calls, forward_sources
from ctj_trainer.checks.trial import Trial

GRADIENTS = Rule(check="amp", name="compiled gradients equal eager ones under autocast")
BUDGET = Rule(check="memory-budget", name="dropout draws once, in forward (activation memory budget)")
_FP32_TOLERANCE = 1e-5
_RANDOM = (nn.Dropout, nn.AlphaDropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.RReLU)
_RANDOM_CALLS = {"dropout", "dropout_", "alpha_dropout", "bernoulli", "rand_like", "randn_like", "multinomial", "rand"}


def check_gradients(trial: Trial, *, autocast: torch.dtype = torch.bfloat16) -> list[Finding]:
    """Compare each weight's gradient with the backward traced under autocast, as is the default, and without.

    Eager runs a backward after autocast was left, so the second is right. Comparing with eager itself would show the
    rounding of bf16 too, which is as large as the error.
    """
    blocks = _autocast_blocks(trial)
    if not blocks:
        return [GRADIENTS.holds(evidence="the code enters no autocast of its own")]
    usual, right = _gradients(trial, autocast, "same_as_forward"), _gradients(trial, autocast, "off")
    differences = {name: _relative(usual.get(name), gradient) for name, gradient in right.items()}
    failures = [
        GRADIENTS.fails(
            name,
            location=next((line for owner, line in blocks.items() if name.startswith(owner)), ""),
            evidence=f"its gradient is off by {difference:.2g} (allowed {_FP32_TOLERANCE:g}), the outputs are not",
            remedy="autocast is off inside, and the backward is traced under the outer one: cast explicitly, or "
            "keep the module eager (ctj_trainer.hooks.no_compile)",
            rewrite='torch._functorch.config.backward_pass_autocast = "off"',
        )
        for name, difference in differences.items()
        if difference > _FP32_TOLERANCE
    ]
    worst = max(differences.values(), default=0.0)
    return GRADIENTS.judge(failures, looked_at=f"{len(differences)} weights, largest difference {worst:.2g}")


def check_memory_budget(trial: Trial, *, budget: float | None = None) -> list[Finding]:
    """A budget under 1.0 recomputes in backward, and may draw dropout's mask anew: wrong gradients, silently."""
    asked = functorch.activation_memory_budget if budget is None else budget
    model = trial.build()
    random = random_operations(model)
    if not random:
        return [BUDGET.does_not_apply(evidence="no random operation in the model")]
    if asked >= 1.0:
        return [BUDGET.holds(evidence=f"budget {asked:g}; random operations: {', '.join(random[:3])}")]
    return [
        BUDGET.fails(
            random[0],
            evidence=f"budget {asked:g} with {len(random)} random operations ({', '.join(random[:3])})",
            remedy="set the budget to 1.0, or use activation checkpointing (it restores the generator's state)",
            rewrite="torch._functorch.config.activation_memory_budget = 1.0",
        )
    ]


def random_operations(model: nn.Module) -> list[str]:
    """Name what draws random numbers in a training forward: modules, and calls in their code."""
    modules = [
        f"{name} ({type(m).__name__})" for name, m in model.named_modules() if isinstance(m, _RANDOM) and _draws(m)
    ]
    found = [
        f"{source.subject} ({name} at {source.at(call)})"
        for source in forward_sources(model)
        for name, call in calls(source.node)
        if name.rsplit(".", 1)[-1] in _RANDOM_CALLS and not name.startswith("self.")
    ]
    return modules + found


def _draws(module: nn.Module) -> bool:
    return getattr(module, "p", 1.0) > 0


def _gradients(trial: Trial, autocast: torch.dtype, backward_autocast: str) -> dict[str, Tensor]:
    torch._dynamo.reset()
    model = trial.build()
    model.compile(backend="aot_eager")
    torch.manual_seed(0)
    with functorch.patch(backward_pass_autocast=backward_autocast):
        with torch.autocast("cpu", dtype=autocast):
            loss = trial.loss(model)
        loss.backward()  # type: ignore[no-untyped-call]
    torch._dynamo.reset()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _relative(one: Tensor | None, other: Tensor) -> float:
    if one is None:
        return float("inf")
    scale = float(other.float().norm())
    return float((one.float() - other.float()).norm()) / scale if scale else float(one.float().norm())


def _autocast_blocks(trial: Trial) -> dict[str, str]:
    """Return the modules (a prefix of parameter names) whose code enters autocast, and where."""
    found = violations(check_autocast(forward_sources(trial.build())))
    names = {finding.subject.split(" and ")[0]: finding.location for finding in found}
    return {"" if name == "the model" else name: location for name, location in names.items()}
