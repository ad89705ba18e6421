"""Offload audit: which hooks of a model would be traced into a graph?"""

from torch import nn

from ctj_trainer.checks.finding import Finding, Rule
from ctj_trainer.hooks import OffloadHooks

HOOKS = Rule(check="offload", name="every side-effecting hook is kept out of graphs")


def check_hooks(model: nn.Module) -> list[Finding]:
    """Audit a model's hooks; cheap, for a model in any state."""
    registry = OffloadHooks.of(model)
    failures = [
        HOOKS.fails(
            getattr(entry, "module", "") or "the model",
            evidence=str(entry),
            remedy="exclude it before the first compiled call",
            rewrite="ctj_trainer.hooks.OffloadHooks.of(model).exclude_all()",
        )
        for entry in registry.traced
    ]
    if not registry.hooks and not failures:
        return [HOOKS.does_not_apply(evidence="no side-effecting hooks")]
    return HOOKS.judge(failures, looked_at=f"{len(registry.hooks)} hooks, all excluded")
