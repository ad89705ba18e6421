"""The registry of side-effecting hooks of one model: what there is, what is excluded, and the audit of both.

Audited before the first compiled call, when every hook is final; `OffloadHooks.exclude_all` is what makes it pass.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from ctj_trainer.hooks.checkpointing import CheckpointFunction, checkpoint_functions
from ctj_trainer.hooks.found import EntryPoint, entry_points


class HookAuditError(RuntimeError):
    """Hooks with side effects would be traced; the message lists each, and how it is excluded."""


@dataclass(frozen=True, kw_only=True)
class OffloadHooks:
    """The hooks of one model and the checkpoint functions of its process, at the moment of `of`."""

    hooks: tuple[EntryPoint, ...]
    checkpoints: tuple[CheckpointFunction, ...]

    @classmethod
    def of(cls, model: nn.Module) -> "OffloadHooks":
        """Look at every module of the model; nothing is changed."""
        return cls(hooks=tuple(entry_points(model)), checkpoints=tuple(checkpoint_functions()))

    @property
    def traced(self) -> tuple[EntryPoint | CheckpointFunction, ...]:
        """What a compiler would still trace."""
        everything: Iterable[EntryPoint | CheckpointFunction] = (*self.hooks, *self.checkpoints)
        return tuple(entry for entry in everything if not entry.is_excluded)

    def exclude_all(self) -> tuple[str, ...]:
        """Exclude what is traced; returns one line for each, for the start report."""
        changed = self.traced
        for entry in changed:
            entry.exclude()
        return tuple(f"{entry}: kept eager" for entry in changed)


def assert_all_disabled(model: nn.Module) -> None:
    """Fail if one side-effecting hook of the model is not excluded from compilation.

    Raises:
        HookAuditError: with every such hook.
    """
    traced = OffloadHooks.of(model).traced
    if traced:
        listed = "\n".join(f"  {entry}" for entry in traced)
        raise HookAuditError(
            f"{len(traced)} hooks with side effects would be traced into a graph:\n{listed}\n"
            "exclude them before the first compiled call: ctj_trainer.hooks.OffloadHooks.of(model).exclude_all(), "
            "or decorate each with ctj_trainer.hooks.no_compile"
        )
