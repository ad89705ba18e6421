"""How does compiled training survive the compiler? Settings, flips and heartbeats while the guard is entered.

A failed compilation runs that region eagerly instead of raising. The backward is compiled together with the forward: a
backward that fails later leaves DDP unusable and, under FSDP2, silently wrong gradients. These settings belong to the
whole process, so each is put back on leaving.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ctj_api.attempt import Mode
from ctj_trainer.compile.breaks import listening
from ctj_trainer.compile.causes import Event
from ctj_trainer.compile.in_place import CompiledRegions
from ctj_trainer.compile.watch import CompileWatch

SWITCHED_BY_PLACEMENT = ("capture_scalar_outputs", "skip_fwd_side_effects_in_bwd_under_checkpoint")


class CompileGuard:
    """Hold compiled execution of this process; use as `with guarded(...) as guard`, and attach the model."""

    def __init__(self, breaks: Sequence[Event] = ()) -> None:
        self.watch = CompileWatch()
        self.mode = Mode.COMPILED
        self.regions = CompiledRegions(nn.Module())
        self.breaks = breaks
        """The first break of each line of source, with its place."""

    def attach(self, inner: nn.Module) -> None:
        """Know the regions of the model, once it is laid out."""
        self.regions = CompiledRegions(inner)

    def run(self, mode: Mode) -> None:
        """Run regions compiled or eager from now on. Only between optimizer steps: a flip between forward and backward
        breaks activation checkpointing."""
        if mode is not self.mode:
            torch.compiler.set_stance("default" if mode is Mode.COMPILED else "force_eager")
            self.mode = mode

    def give_up(self, names: Sequence[str]) -> None:
        """Run these regions eager for good, and free what was compiled for them. Only between optimizer steps."""
        self.regions.make_eager(names)
        self.regions.forget()

    def close(self) -> None:
        """Leave torch's records and entries as if nothing had failed here."""
        self.regions.forget()
        self.watch.close()

    def start_over(self) -> None:
        """Forget what was compiled and what failed; the next call compiles. Only between optimizer steps."""
        torch._dynamo.reset()
        self.watch.close()
        self.watch = CompileWatch()


@contextmanager
def guarded(*, on_compiling: Callable[[], AbstractContextManager[None]]) -> Iterator[CompileGuard]:
    """Survive compile failures inside; `on_compiling()` is entered for the time of each compilation."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    from torch._dynamo.callback import callback_handler

    # A private name: without it a lazy backward may fail after gradients were reduced. Better not to start.
    assert hasattr(functorch, "force_non_lazy_backward_lowering"), "this torch cannot compile backward with forward"

    running = ExitStack()

    def started(_: Any) -> None:
        running.enter_context(on_compiling())

    def ended(_: Any) -> None:
        running.close()

    with ExitStack() as stack:
        stack.enter_context(dynamo.patch(suppress_errors=True))
        # What placement switches on for a kind of model goes off again with us.
        stack.enter_context(dynamo.patch({name: getattr(dynamo, name) for name in SWITCHED_BY_PLACEMENT}))
        stack.enter_context(functorch.patch(force_non_lazy_backward_lowering=True))
        stack.enter_context(_quiet("torch._dynamo.convert_frame"))
        callback_handler.register_start_callback(started)
        stack.callback(callback_handler.remove_start_callback, started)
        callback_handler.register_end_callback(ended)
        stack.callback(callback_handler.remove_end_callback, ended)
        stack.enter_context(torch.compiler.set_stance("default"))  # the caller's own stance is back afterwards
        guard = CompileGuard(stack.enter_context(listening()))
        stack.callback(guard.close)
        yield guard


@contextmanager
def _quiet(logger_name: str) -> Iterator[None]:
    """Mute torch's own report of each failed frame (a hundred lines, per frame and rank): ours is one line per job."""
    logger = logging.getLogger(logger_name)

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger.addFilter(is_error)
    try:
        yield
    finally:
        logger.removeFilter(is_error)
