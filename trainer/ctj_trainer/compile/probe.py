"""Is compiled equal to eager? Both forward and backward on the same micro batch from equal state, without an update.

It doubles as the warm-up: the first compilation happens here, on every rank, before any step counts. Where only some
regions fail or differ, those alone become eager.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from ctj_api.attempt import Mode
from ctj_api.tolerances import Limits
from ctj_trainer.compile.causes import REMEDIES, EventKind, FaultClass
from ctj_trainer.compile.complaint import Complaint, about_failures, merged
from ctj_trainer.compile.guard import CompileGuard
from ctj_trainer.compile.verdict import ProbeResult
from ctj_trainer.evidence import relative_difference
from ctj_trainer.ranks import Ranks

MOST_PASSES = 16  # to find the region that differs: 2 log2(regions) for one that does


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Global loss and gradient norm of one pass."""

    loss: float
    grad_norm: float


Pass = Callable[[int], Outcome]
"""Forward, backward, discard: seeded by the argument. Collective."""


def probe(run: Pass, *, inner: nn.Module, guard: CompileGuard, limits: Limits, ranks: Ranks) -> ProbeResult:
    """Compare the two forms, and make eager what stands in the way of the rest.

    Leaves weights, buffers, generators and optimizer as they were. Collective.
    """
    given_up: list[Complaint] = []
    with torch.random.fork_rng(devices=[ranks.device] if ranks.device.type == "cuda" else []):
        while True:
            result, complaint = _compare_fairly(run, inner, guard, limits, ranks)
            result = replace(result, given_up=tuple(given_up))
            if complaint is None or not complaint.regions or {*complaint.regions} >= {*guard.regions.compiled}:
                return result
            guard.give_up(complaint.regions)
            given_up.append(complaint)


def _compare_fairly(
    run: Pass, inner: nn.Module, guard: CompileGuard, limits: Limits, ranks: Ranks
) -> tuple[ProbeResult, Complaint | None]:
    result, complaint = _compare(run, inner, guard, limits, ranks)
    if complaint is None or complaint.fault is not FaultClass.NUMERICS:
        return result, complaint
    if _is_stochastic(run, inner, guard):
        # Eager and compiled draw different masks; compare without them. One more graph, only for such models.
        with _evaluating(inner):
            result, complaint = _compare(run, inner, guard, limits, ranks)
            if complaint is not None and complaint.fault is FaultClass.NUMERICS:
                complaint = _located(complaint, run, inner, guard, limits)
        return result, complaint
    return result, _located(complaint, run, inner, guard, limits)


def _compare(
    run: Pass, inner: nn.Module, guard: CompileGuard, limits: Limits, ranks: Ranks
) -> tuple[ProbeResult, Complaint | None]:
    guard.run(Mode.EAGER)
    eager = run_from(run, inner, seed=0)
    guard.run(Mode.COMPILED)
    began = time.perf_counter()
    compiled = run_from(run, inner, seed=0)
    compiled_seconds = time.perf_counter() - began
    complaint = merged(ranks.gather(_problem(guard)))
    if complaint is not None:
        return ProbeResult(problem=complaint.reason, fault=complaint.fault), complaint
    result = _difference(compiled, eager, seconds=compiled_seconds)
    if _within(result, limits):
        return result, None
    return result, Complaint(fault=FaultClass.NUMERICS, reason=f"not equal to eager: {result}")


def _problem(guard: CompileGuard) -> Complaint | None:
    """Why there is no compiled form to compare."""
    facts = guard.watch.read()
    # Recompilations stay for the first step's look: a value that changes with every call already shows here.
    complaint = about_failures(guard.watch.take((EventKind.FAILURE, EventKind.LIMIT)), guard.regions)
    if complaint is None and not facts.graphs:
        reason = "nothing_compiled: no graph was captured; are the blocks torch.nn containers or disabled?"
        return Complaint(fault=FaultClass.UNKNOWN, reason=reason)
    return complaint


def _located(complaint: Complaint, run: Pass, inner: nn.Module, guard: CompileGuard, limits: Limits) -> Complaint:
    """Find the regions that differ when they alone are compiled. The same on every rank: what is compared is global."""
    guard.run(Mode.EAGER)
    eager = run_from(run, inner, seed=0)
    guard.run(Mode.COMPILED)
    passes = 0

    def is_equal(names: Sequence[str]) -> bool:
        nonlocal passes
        passes += 1
        with guard.regions.only(names):
            return _within(_difference(run_from(run, inner, seed=0), eager), limits)

    def differing(names: tuple[str, ...]) -> tuple[str, ...]:
        if is_equal(names):
            return ()
        if len(names) == 1 or passes >= MOST_PASSES:
            return names
        half = len(names) // 2
        return (*differing(names[:half]), *differing(names[half:])) or names

    found = tuple(name for group in guard.regions.alike() for name in differing(group))
    return replace(complaint, reason=f"{complaint.reason}; {REMEDIES[FaultClass.NUMERICS]}", regions=found)


def run_from(run: Pass, inner: nn.Module, *, seed: int) -> Outcome:
    """Run one pass and put the buffers back (BatchNorm moves its statistics in every forward)."""
    before = {name: buffer.clone() for name, buffer in inner.named_buffers()}
    outcome = run(seed)
    with torch.no_grad():
        for name, buffer in inner.named_buffers():
            buffer.copy_(before[name])
    return outcome


def _difference(compiled: Outcome, eager: Outcome, *, seconds: float | None = None) -> ProbeResult:
    return ProbeResult(
        loss_relative=relative_difference(compiled.loss, eager.loss),
        grad_norm_relative=relative_difference(compiled.grad_norm, eager.grad_norm),
        compiled_seconds=seconds,
    )


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
