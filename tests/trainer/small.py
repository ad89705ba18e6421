"""A job small enough for every strategy in a test: one recipe, one training, and a loop that records what happens."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ctj_api.spec import Offload, Strategy, Training
from ctj_trainer.batches import SampleOrder, micro_batches
from ctj_trainer.checkpoint import Checkpoints, Description
from ctj_trainer.checkpoint.storage import AnyPath
from ctj_trainer.optimizer import Schedule
from ctj_trainer.recipe import Recipe, RecipeContext, collate, load_recipe
from ctj_trainer.strategies import Place, prepare
from ctj_trainer.strategies.prepared import Prepared

CPU = torch.device("cpu")
GLOBAL_BATCH = 8
SEQUENCE = 32
EVERY_STRATEGY = tuple(Strategy)


def training(**changes: Any) -> Training:
    document = {
        "steps": 20,
        "globalBatchSize": GLOBAL_BATCH,
        "microBatchSize": 2,
        "seed": 0,
        "optimizer": {"learningRate": "3e-3", "warmupSteps": 3, "gradientClip": "1.0"},
    }
    return Training.from_document(document | changes)


def recipe(*, key_value_heads: int = 2, tie_embeddings: bool = False) -> Recipe:
    model = {
        "hiddenSize": 32,
        "layers": 2,
        "heads": 4,
        "keyValueHeads": key_value_heads,
        "tieEmbeddings": tie_embeddings,
    }
    config = {"model": model, "data": {"builtin": "python-stdlib", "sequenceLength": SEQUENCE}}
    return load_recipe("causal_lm", config, RecipeContext(device=CPU, seed=0))


@dataclass(kw_only=True)
class Trained:
    """A prepared model and what its steps showed."""

    strategy: Strategy
    prepared: Prepared
    recipe: Recipe
    training: Training
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    @property
    def alone(self) -> bool:
        return self.strategy is Strategy.SINGLE

    def run(self, steps: range, *, micro_batch_size: int = 2) -> list[float]:
        """Train on the samples of these steps; return their global mean losses."""
        for step in steps:
            self.gradients(step, micro_batch_size=micro_batch_size)
            rate = Schedule.of(self.training).learning_rate(step)
            clip = float(self.training.optimizer.gradient_clip)
            self.norms.append(self.prepared.step(learning_rate=rate, clip=clip))
        return self.losses[-len(steps) :]

    def gradients(self, step: int, *, micro_batch_size: int = 2) -> None:
        order = SampleOrder(num_samples=len(self.recipe.samples), global_batch_size=GLOBAL_BATCH, seed=0)
        rank, world_size = (0, 1) if self.alone else (dist.get_rank(), dist.get_world_size())
        shares = micro_batches(order.of_step(step), rank=rank, world_size=world_size, micro_batch_size=micro_batch_size)
        total = torch.zeros(())
        for index, share in enumerate(shares):
            with self.prepared.accumulating(last=index == len(shares) - 1):
                loss, _ = self.recipe.loss(self.prepared.model, collate(self.recipe.samples, share))
                self.prepared.backward(loss / (GLOBAL_BATCH * SEQUENCE))
            total += loss.detach() / (GLOBAL_BATCH * SEQUENCE)
        if not self.alone:
            dist.all_reduce(total)
        self.losses.append(float(total))


@contextmanager
def trained(
    strategy: Strategy,
    *,
    of: Recipe | None = None,
    place: Place | None = None,
    offload: Offload = Offload.NONE,
    **changes: Any,
) -> Iterator[Trained]:
    """A model ready to train; under `single` each rank of a pair has its own."""
    group_of(strategy)  # made by all ranks together, though not all of them may save
    chosen, settings = of or recipe(), training(**changes)
    prepared = prepare(
        strategy,
        chosen,
        training=settings,
        micro_batch_size=settings.micro_batch_size,
        device=CPU,
        place=place,
        offload=offload,
    )
    try:
        yield Trained(strategy=strategy, prepared=prepared, recipe=chosen, training=settings)
    finally:
        prepared.close()


def checkpoints(root: AnyPath, *, strategy: Strategy = Strategy.DDP, **changes: Any) -> Checkpoints:
    """The checkpoint root of attempt 1; under `single` rank 0 alone takes part."""
    facts: dict[str, Any] = {
        "attempt": 1,
        "lineage": (),
        "floor_step": 0,
        "keep": 3,
        "pinned": frozenset(),
        "group": group_of(strategy),
        "notice": lambda _: None,
    }
    return Checkpoints(root=root, **(facts | changes))


_groups: list[dist.ProcessGroup] = []


def group_of(strategy: Strategy) -> dist.ProcessGroup:
    """All ranks, or each rank for itself."""
    if not _groups:
        limit = timedelta(seconds=60)
        each = [dist.new_group([rank], timeout=limit) for rank in range(dist.get_world_size())]
        _groups.extend([dist.new_group(timeout=limit), each[dist.get_rank()]])
    return _groups[1] if strategy is Strategy.SINGLE else _groups[0]


def description(step: int, strategy: Strategy = Strategy.DDP, *, stage: str = "s", finite: bool = True) -> Description:
    return Description(step=step, stage=stage, strategy=strategy, samples=step * GLOBAL_BATCH, finite=finite)
