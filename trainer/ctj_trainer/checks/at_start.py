"""What a stage checks by itself, before its first compiled call: what is cheap, in the state it is in.

Violations become notices in the report. Hooks that would be traced are excluded first, and each is told: compiled
regions then hold only computation.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from torch import nn

from ctj_api.spec import Strategy, Training
from ctj_trainer.batches import SampleOrder, micro_batches
from ctj_trainer.checks.ddp import Signature, judge_shapes, signature
from ctj_trainer.checks.finding import Finding, violations
from ctj_trainer.checks.hook_audit import check_hooks
from ctj_trainer.hooks import OffloadHooks
from ctj_trainer.ranks import Ranks
from ctj_trainer.recipe import Recipe, collate

_MAX_NOTICES = 3  # of the report's eight
_MAX_LENGTH = 300  # a report has 4 KiB
_BATCHES = 2


def exclude_hooks(model: nn.Module) -> tuple[str, ...]:
    """Keep the model's side-effecting hooks out of graphs; returns one line if there were any."""
    told = OffloadHooks.of(model).exclude_all()
    more = f", and {len(told) - 1} more" if len(told) > 1 else ""
    return (f"{told[0]}{more}"[:_MAX_LENGTH],) if told else ()


def problems_at_start(model: nn.Module, strategy: Strategy, *, shapes: Sequence[Sequence[Signature]]) -> list[str]:
    """Judge a laid-out model and the first batches of every rank (none: not judged)."""
    # DeepSpeed's own hooks, added when it laid the model out, stand around the compiled forwards: not traced.
    hooks = [] if strategy is Strategy.ZERO3 else check_hooks(model)
    findings = [
        *hooks,
        *(judge_shapes(shapes, dynamic=None) if shapes else ()),
        *_managed(model, strategy),
    ]
    return [_line(finding) for finding in violations(findings)[:_MAX_NOTICES]]


def first_shapes(
    recipe: Recipe, training: Training, *, ranks: Ranks, micro_batch_size: int
) -> list[tuple[Signature, ...]]:
    """Return the shapes of the first micro batches of every rank. Collective."""
    order = SampleOrder(
        num_samples=len(recipe.samples), global_batch_size=training.global_batch_size, seed=training.seed
    )
    shares = micro_batches(
        order.of_step(1), rank=ranks.rank, world_size=ranks.world_size, micro_batch_size=micro_batch_size
    )
    mine: tuple[Signature, ...] = tuple(signature(collate(recipe.samples, share)) for share in islice(shares, _BATCHES))
    return ranks.gather(mine)


def _managed(model: nn.Module, strategy: Strategy) -> Iterator[Finding]:
    if strategy is Strategy.FSDP:
        from ctj_trainer.checks.fsdp import check_managed

        yield from check_managed(model)


def _line(finding: Finding) -> str:
    return f"{finding.check}: {finding.evidence}; {finding.remedy}"[:_MAX_LENGTH]
