"""What runs around a module's computation and must stay out of compiled graphs: hooks that move, cast or draw."""

from ctj_trainer.hooks.excluded import is_excluded, no_compile
from ctj_trainer.hooks.registry import HookAuditError, OffloadHooks, assert_all_disabled

__all__ = ["HookAuditError", "OffloadHooks", "assert_all_disabled", "is_excluded", "no_compile"]
