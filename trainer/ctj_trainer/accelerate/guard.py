"""Keep a script's training alive when its compiled code fails or storms: eager on every rank, between two steps.

One vote for each optimizer step, on a gloo group of its own: a decision of one rank alone on the data's group would
meet a gradient of another. torch's switches are put back at the end.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ctj_api.attempt import Mode
from ctj_trainer.accelerate.layout import layout_of
from ctj_trainer.compile.complaint import Complaint, about_events, merged
from ctj_trainer.compile.entry import uncaptured
from ctj_trainer.compile.guard import CompileGuard, guarded
from ctj_trainer.compile.policy import CompilePolicy
from ctj_trainer.compile.storm import StormRule
from ctj_trainer.compile.timing import WARM_STEPS
from ctj_trainer.compile.watch import CompileFacts

log = logging.getLogger("ctj")


class ScriptGuard:
    """Counts what the compiler does in a script's loop, and makes eager what does not compile or settle."""

    def __init__(self, guard: CompileGuard, policy: CompilePolicy, model: nn.Module) -> None:
        self._guard = guard
        self._model = model
        self._storm = StormRule(declared_shapes=len(policy.shapes))
        # torch marks a rank outside of a group by a number; every rank is in this one.
        self._group: Any = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")
        self.steps = 0
        self.gave_up: list[str] = []
        """Why something was made eager, each time."""

    @property
    def facts(self) -> CompileFacts:
        """What was compiled since the guard began."""
        return self._guard.watch.read()

    def after_step(self) -> None:
        """Judge one optimizer step. Collective; called by the optimizer itself where the guard was given one."""
        self.steps += 1
        if self.steps == 1:
            for name in uncaptured(self._model):
                log.warning("region %s has no graph: was its forward replaced by a function no compiler enters?", name)
        complaint = self._agreed(self._complaint())
        if complaint is None:
            return
        compiled = self._guard.regions.compiled
        named = [name for name in complaint.regions if name in compiled] or list(compiled)
        self._guard.give_up(named)
        if not self._guard.regions.compiled:
            self._guard.run(Mode.EAGER)
        self.gave_up.append(complaint.reason)
        log.warning("eager after step %d: %s: %s", self.steps, ", ".join(named) or "everything", complaint.reason)

    def _complaint(self) -> Complaint | None:
        self._guard.watch.read()
        events, regions = self._guard.watch.take(), self._guard.regions
        if not events or self._guard.mode is Mode.EAGER:
            return None
        return about_events(events, regions, self._storm, step=self.steps, is_warming=self.steps <= WARM_STEPS)

    def _agreed(self, mine: Complaint | None) -> Complaint | None:
        """Every rank gives up what one does. Only a step with a complaint costs more than one byte."""
        if self._group is None:
            return mine
        flag = torch.tensor([int(mine is not None)], dtype=torch.int8)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        if not flag.item():
            return None
        complaints: list[Complaint | None] = [None] * dist.get_world_size()
        dist.all_gather_object(complaints, mine, group=self._group)
        return merged(complaints)


@contextmanager
def compile_guard(policy: CompilePolicy, model: nn.Module, *, optimizer: Any = None) -> Iterator[ScriptGuard | None]:
    """Guard the training loop of a compiled model; None where nothing is compiled. Enter it before the first forward.

    With an optimizer each of its steps is judged by itself; without, call `after_step()` after each. On every rank.
    """
    if not policy.compiles:
        yield None
        return
    with ExitStack() as stack:
        guard = stack.enter_context(guarded(on_compiling=nullcontext))
        guard.attach(layout_of(model).inner)
        script = ScriptGuard(guard, policy, model)
        if optimizer is not None:
            # Accelerate's wrapper steps the real one only when gradients are complete.
            real = getattr(optimizer, "optimizer", optimizer)
            handle = real.register_step_post_hook(lambda *_: script.after_step())
            stack.callback(handle.remove)
        yield script
