"""DDP compliance: each rule judged from plain observations, so that a job, a test and `ctj check` share the judges."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ctj_trainer.checks.finding import Finding, Rule
from ctj_trainer.checks.source import Source, calls, text

PHASES = Rule(check="ddp", name="gradients are all-reduced in backward only")
APART = Rule(check="ddp", name="forward and backward are compiled apart")
SHAPES = Rule(check="ddp", name="shapes are consistent, over steps and across ranks")
UNUSED = Rule(check="ddp", name="find_unused_parameters is on only where parameters are unused")
SPLIT = Rule(check="ddp", name="every rank gets equally many samples")

_REDUCER = "python_reducer"  # DDP's modes of this name put the reduction into the graph
Signature = tuple[tuple[tuple[int, ...], str], ...]
"""Shape and dtype of each tensor of one batch, in the order of their names."""


def signature(batch: Mapping[str, Tensor]) -> Signature:
    """Return a batch's signature."""
    return tuple((tuple(tensor.shape), str(tensor.dtype)) for _, tensor in sorted(batch.items()))


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective that was seen, and when."""

    operation: str
    phase: str
    """forward, or backward."""


def judge_phases(seen: Sequence[Collective], *, buckets: int) -> list[Finding]:
    """Judge when collectives ran; `buckets` of them are DDP's own reductions, seen by its communication hook."""
    early = Counter(c.operation for c in seen if c.phase == "forward" and "broadcast" not in c.operation)
    failures = [
        PHASES.fails(
            evidence=f"{count} x {operation} during forward",
            remedy="move it out of the model: a graph that holds a collective cannot fall back on one rank alone",
        )
        for operation, count in sorted(early.items())
    ]
    if not buckets:
        return [*failures, PHASES.does_not_apply(evidence="no gradient was reduced: nothing requires gradients")]
    return PHASES.judge(failures, looked_at=f"{buckets} buckets, all in backward")


def judge_apart(
    *, forward: int, backward: int, settings: Mapping[str, object], sources: Sequence[Source]
) -> list[Finding]:
    """Judge how many graphs were made of each, and the settings and code that merge them."""
    failures = []
    if settings.get("compiled_autograd"):
        failures.append(
            APART.fails(
                evidence="compiled_autograd is on: the backward is traced as one graph over hooks and buckets",
                remedy="turn it off; with ZeRO-3 it sees parameters of size 0",
                rewrite="torch._dynamo.config.compiled_autograd = False",
            )
        )
    if str(settings.get("optimize_ddp", "")).startswith(_REDUCER):
        failures.append(
            APART.fails(
                evidence=f"optimize_ddp is {settings['optimize_ddp']!r}: the reduction is in the graph",
                remedy="use the default, which keeps it in DDP's reducer",
                rewrite="torch._dynamo.config.optimize_ddp = True",
            )
        )
    for source in sources:
        for name, call in calls(source.node):
            if name.endswith((".backward", "autograd.grad")):
                failures.append(
                    APART.fails(
                        source.subject,
                        location=source.at(call),
                        evidence=f"`{text(call)}` runs a backward inside the forward: DDP's hooks fire in between",
                        remedy="move it to the loss, or keep it out of compile: ctj_trainer.hooks.no_compile",
                    )
                )
    if not failures and not forward:
        return [APART.fails(evidence="no forward graph was made", remedy="compile blocks of your own classes")]
    return APART.judge(failures, looked_at=f"{forward} forward and {backward} backward graphs")


def judge_shapes(ranks: Sequence[Sequence[Signature]], *, dynamic: bool | None) -> list[Finding]:
    """Judge the batches that each rank gets, step by step."""
    counts = [len(batches) for batches in ranks]
    if not any(counts):
        return [SHAPES.does_not_apply(evidence="no batch was seen")]
    if len(set(counts)) > 1:
        return [
            SHAPES.fails(
                evidence=f"batches per rank: {counts}: a rank that ends early leaves the others in their collective",
                remedy="drop the last uneven batch, or repeat samples, or use model.join()",
            )
        ]
    failures = []
    steps = (_same_kind(step, batches) for step, batches in enumerate(zip(*ranks, strict=True)))
    failures += next((found for found in steps if found), [])
    seen = {signature for batches in ranks for signature in batches}
    if dynamic is False and len(seen) > 1:
        failures.append(
            SHAPES.fails(
                evidence=f"{len(seen)} different shapes with dynamic off: each is compiled by itself, at other moments "
                "on other ranks",
                remedy="leave dynamic at Auto, or pad to one length",
                rewrite="spec.compile.dynamic: Auto",
            )
        )
    return SHAPES.judge(failures, looked_at=f"{len(seen)} shapes in {counts[0]} batches on {len(ranks)} ranks")


def judge_unused(unused: Sequence[frozenset[str]], *, find_unused: bool, static_graph: bool = False) -> list[Finding]:
    """Judge the flag against which parameters had no gradient, batch by batch."""
    ever, names = frozenset().union(*unused), ", ".join(sorted(frozenset().union(*unused))[:3])
    if ever and static_graph and len(set(unused)) > 1:
        return [
            UNUSED.fails(
                names,
                evidence=f"static_graph is on, but other parameters are unused from batch to batch ({names})",
                remedy="turn static_graph off",
            )
        ]
    if ever and not find_unused and not static_graph:
        return [
            UNUSED.fails(
                names,
                evidence=f"{len(ever)} parameters get no gradient: DDP waits for them and raises in the next step",
                remedy="use them in every forward, freeze them (requires_grad_(False)), or set find_unused_parameters",
            )
        ]
    if find_unused and not ever:
        return [
            UNUSED.fails(
                evidence="find_unused_parameters walks the autograd graph in every step and keeps buckets from being "
                "rebuilt; every parameter had a gradient",
                remedy="turn it off",
                rewrite="DistributedDataParallel(model, find_unused_parameters=False)",
            )
        ]
    if find_unused and len(set(unused)) == 1:
        return [
            UNUSED.fails(
                names,
                evidence=f"always the same {len(ever)} parameters are unused ({names})",
                remedy="freeze them, or set static_graph=True: buckets then keep their size",
            )
        ]
    return [UNUSED.holds(evidence=f"{len(ever)} unused in {len(unused)} batches, find_unused_parameters {find_unused}")]


@dataclass(frozen=True, kw_only=True)
class Dealing:
    """How samples are dealt out; `batch_size` is the loader's (the whole one with `split_batches`)."""

    num_samples: int
    batch_size: int
    world_size: int
    split_batches: bool = False
    even_batches: bool = True
    drop_last: bool = False

    @property
    def round_size(self) -> int:
        """Samples that all ranks take together."""
        return self.batch_size if self.split_batches else self.batch_size * self.world_size


def judge_split(dealing: Dealing) -> list[Finding]:
    """Judge whether every rank gets equally many samples in every round."""
    failures = []
    whole, rest = dealing.round_size, dealing.num_samples % dealing.round_size
    if dealing.split_batches and dealing.batch_size % dealing.world_size:
        failures.append(
            SPLIT.fails(
                evidence=f"split_batches divides a batch of {dealing.batch_size} by {dealing.world_size} processes",
                remedy=f"use a multiple of {dealing.world_size}, or split_batches=False",
            )
        )
    if rest and not dealing.drop_last and not dealing.even_batches:
        failures.append(
            SPLIT.fails(
                evidence=f"the last round has {rest} of {whole} samples, and even_batches is off: some ranks get fewer",
                remedy="set drop_last=True or even_batches=True, or use join_uneven_inputs",
            )
        )
    if dealing.num_samples < whole:
        failures.append(
            SPLIT.fails(
                evidence=f"{dealing.num_samples} samples do not fill one round of {whole}",
                remedy="use a smaller batch or fewer processes",
            )
        )
    return SPLIT.judge(failures, looked_at=f"{dealing.num_samples} samples in rounds of {whole}, {rest} left over")


def _same_kind(step: int, batches: Sequence[Signature]) -> list[Finding]:
    """Ranks may differ in a length, not in what the tensors are; sizes 0 and 1 are compiled apart."""
    kinds = {tuple((len(shape), dtype) for shape, dtype in batch) for batch in batches}
    if len(kinds) > 1:
        return [
            SHAPES.fails(
                evidence=f"batch {step}: ranks get tensors of other rank or dtype: {sorted(map(str, kinds))[:2]}",
                remedy="let the collator return the same fields, dimensions and dtypes everywhere",
            )
        ]
    small = {tuple(size if size < 2 else 2 for shape, _ in batch for size in shape) for batch in batches}
    if len(small) > 1:
        return [
            SHAPES.fails(
                evidence=f"batch {step}: a dimension is 0 or 1 on some ranks only: those compile once more, alone",
                remedy="deal samples out so that no rank gets a single one, or pad",
            )
        ]
    return []
