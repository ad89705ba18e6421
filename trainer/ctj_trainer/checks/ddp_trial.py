"""Observe a model under DDP in one process: when collectives run, how many graphs there are, what is unused."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from ctj_trainer.checks.ddp import Collective, judge_apart, judge_phases, judge_unused
from ctj_trainer.checks.finding import Finding
from ctj_trainer.checks.group import alone
from ctj_trainer.checks.source import forward_sources
from ctj_trainer.checks.trial import Trial

_NAMESPACES = ("c10d::", "_c10d_functional::", "c10d_functional::", "_dtensor::")


def check_ddp(trials: Sequence[Trial], *, find_unused: bool = False, static_graph: bool = False) -> list[Finding]:
    """Run every trial (batches of one model) under DDP; the first decides about phases and graphs."""
    first = trials[0]
    with alone():
        seen, buckets = observe_phases(first)
    forward, backward = count_graphs(first)
    import torch._dynamo.config as dynamo

    settings = {"optimize_ddp": dynamo.optimize_ddp, "compiled_autograd": dynamo.compiled_autograd}
    return [
        *judge_phases(seen, buckets=buckets),
        *judge_apart(forward=forward, backward=backward, settings=settings, sources=forward_sources(first.build())),
        *judge_unused([unused_parameters(t) for t in trials], find_unused=find_unused, static_graph=static_graph),
    ]


def observe_phases(trial: Trial) -> tuple[list[Collective], int]:
    """Return the collectives of one eager step, and how many buckets DDP reduced in backward."""
    seen: list[Collective] = []
    buckets: list[str] = []
    phase = ["forward"]

    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets.append(phase[0])
        seen.append(Collective(operation="gradient bucket", phase=phase[0]))
        return allreduce_hook(state, bucket)

    model = trial.build()
    if not any(p.requires_grad for p in model.parameters()):
        return seen, 0
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    wrapped.register_comm_hook(None, hook)
    with _collectives(seen, phase):
        loss = trial.loss(wrapped)
    phase[0] = "backward"
    loss.backward()  # type: ignore[no-untyped-call]
    return seen, buckets.count("backward")


def count_graphs(trial: Trial) -> tuple[int, int]:
    """Return how many forward and backward graphs a compiled step makes; nothing is generated."""
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
    from torch._dynamo.backends.common import aot_autograd

    made = {"forward": 0, "backward": 0}

    def counting(kind: str) -> Any:
        def compiler(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
            del inputs
            made[kind] += 1
            return make_boxed_func(graph.forward)

        return compiler

    torch._dynamo.reset()
    model = trial.build()
    model.compile(backend=aot_autograd(fw_compiler=counting("forward"), bw_compiler=counting("backward")))
    loss = trial.loss(model)
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    torch._dynamo.reset()
    return made["forward"], made["backward"]


def unused_parameters(trial: Trial) -> frozenset[str]:
    """Return the names of trainable parameters that one batch gives no gradient."""
    model = trial.build()
    loss = trial.loss(model)
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    return frozenset(name for name, p in model.named_parameters() if p.requires_grad and p.grad is None)


@contextmanager
def _collectives(seen: list[Collective], phase: list[str]) -> Iterator[None]:
    class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            name = func._schema.name
            if name.startswith(_NAMESPACES) and "wait" not in name:
                seen.append(Collective(operation=name.split("::")[1].rstrip("_"), phase=phase[0]))
            return func(*args, **(kwargs or {}))

    with Watching():  # type: ignore[no-untyped-call]
        yield
