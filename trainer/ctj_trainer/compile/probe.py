"""Is compiled equal to eager? Both forward and backward on the same micro batch from equal state, without an update.

It doubles as the warm-up: the first compilation happens here, on every rank, before any step counts.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from ctj_api.attempt import Mode
from ctj_api.tolerances import Limits
from ctj_trainer.compile.guard import CompileGuard
from ctj_trainer.compile.verdict import ProbeResult
from ctj_trainer.evidence import relative_difference
from ctj_trainer.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Global loss and gradient norm of one pass."""

    loss: float
    grad_norm: float


Pass = Callable[[int], Outcome]
"""Forward, backward, discard: seeded by the argument. Collective."""


def probe(run: Pass, *, inner: nn.Module, guard: CompileGuard, limits: Limits, ranks: Ranks) -> ProbeResult:
    """Compare the two forms. Leaves weights, buffers, generators and optimizer as they were. Collective."""
    with torch.random.fork_rng(devices=[ranks.device] if ranks.device.type == "cuda" else []):
        result = _compare(run, inner, guard, ranks)
        if result.problem or _within(result, limits) or not _is_stochastic(run, inner, guard):
            return result
        # Eager and compiled draw different masks; compare without them. One more graph, only for such models.
        with _evaluating(inner):
            return _compare(run, inner, guard, ranks)


def _compare(run: Pass, inner: nn.Module, guard: CompileGuard, ranks: Ranks) -> ProbeResult:
    guard.run(Mode.EAGER)
    eager = run_from(run, inner, seed=0)
    guard.run(Mode.COMPILED)
    began = time.perf_counter()
    compiled = run_from(run, inner, seed=0)
    compiled_seconds = time.perf_counter() - began
    problem = _first_problem(guard, ranks)
    if problem:
        return ProbeResult(problem=problem)
    return ProbeResult(
        loss_relative=relative_difference(compiled.loss, eager.loss),
        grad_norm_relative=relative_difference(compiled.grad_norm, eager.grad_norm),
        compiled_seconds=compiled_seconds,
    )


def _first_problem(guard: CompileGuard, ranks: Ranks) -> str:
    """Why there is no compiled form to compare, on the first rank that has none."""
    facts = guard.watch.read()
    problem = ""
    if facts.failures:
        problem = f"backend_failed: {facts.failure_reason}"
    elif facts.limit_hits:
        problem = f"recompile_limit: {facts.recompile_reason}"
    elif not facts.graphs:
        problem = "nothing_compiled: no graph was captured; are the blocks torch.nn containers or disabled?"
    problems = [(rank, text) for rank, text in enumerate(ranks.gather(problem)) if text]
    if not problems:
        return ""
    rank, text = problems[0]
    return text if len(problems) == ranks.world_size else f"{text} (rank {rank})"


def run_from(run: Pass, inner: nn.Module, *, seed: int) -> Outcome:
    """Run one pass and put the buffers back (BatchNorm moves its statistics in every forward)."""
    before = {name: buffer.clone() for name, buffer in inner.named_buffers()}
    outcome = run(seed)
    with torch.no_grad():
        for name, buffer in inner.named_buffers():
            buffer.copy_(before[name])
    return outcome


def _is_stochastic(run: Pass, inner: nn.Module, guard: CompileGuard) -> bool:
    guard.run(Mode.EAGER)
    return run_from(run, inner, seed=0) != run_from(run, inner, seed=1)


def _within(result: ProbeResult, limits: Limits) -> bool:
    assert result.loss_relative is not None
    assert result.grad_norm_relative is not None
    return result.loss_relative <= limits.probe_loss and result.grad_norm_relative <= limits.probe_grad_norm


@contextmanager
def _evaluating(inner: nn.Module) -> Iterator[None]:
    training = [module for module in inner.modules() if module.training]
    inner.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
