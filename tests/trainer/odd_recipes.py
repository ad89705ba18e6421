"""Recipes that misbehave in one way each, for the tests of the loop: `tests.trainer.odd_recipes:build`."""

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctj_trainer.recipe import Batch, Recipe, RecipeContext

WIDTH = 8
LENGTH = 6
NUM_SAMPLES = 64


class Block(nn.Module):
    """Normal, except for what `oddity` says."""

    def __init__(self, oddity: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5 if oddity == "dropout" else 0.0)
        self.counts_calls = oddity == "counts_calls"
        self.calls = 0
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.keeps_statistics = oddity == "statistics"
        self.looks_at_distances = oddity == "distances"

    def forward(self, x: Tensor) -> Tensor:
        if self.counts_calls:
            self.calls += 1  # an int attribute: a new guard, and a new graph, for every call
        y = self.dropout(torch.tanh(self.linear(x)))
        if self.looks_at_distances:
            y = y + torch.pdist(y.flatten(0, 1)).mean()
        if self.keeps_statistics:
            self.mean.mul_(0.9).add_(y.detach().mean(dim=(0, 1)), alpha=0.1)
        return x + y * (1 + self.calls * 1e-9)


class Gated(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.linear(x))


class Late(Block):
    """Of its own class, and with an attribute that another module changes."""

    late = False

    def forward(self, x: Tensor) -> Tensor:
        if self.counts_calls:
            self.calls += 1
        y = torch.relu(self.linear(x))
        return x - y if self.late else x + y * -1.0


class Constant(Block):
    """Each with a number of its own: one graph for each of them."""

    number = 0

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.number


def blocks_for(oddity: str) -> list[Block]:
    if oddity.startswith("mixed"):  # three graphs, the third of `blocks.3` alone
        kinds = (Block, Gated, Block, Late)
        return [kind("counts_calls" if kind is Late and "counts_calls" in oddity else "none") for kind in kinds]
    if oddity == "constants":
        constants = [Constant(oddity) for _ in range(6)]
        for number, block in enumerate(constants, start=1):
            block.number = number
        return list(constants)
    return [Block(oddity) for _ in range(2)]


class Model(nn.Module):
    def __init__(self, oddity: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(blocks_for(oddity))
        self.head = nn.Linear(WIDTH, 16)
        self.changes_late = oddity == "mixed_late"
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        if self.changes_late:
            self.blocks[3].late = self.calls > 14  # the same numbers, by another graph
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Samples:
    """Sample i is random by i; `ragged`: a different number of its targets counts."""

    def __init__(self, *, ragged: bool) -> None:
        self._ragged = ragged

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[Batch]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(16, (LENGTH,), generator=generator)
        targets = torch.randint(16, (LENGTH,), generator=generator)
        if self._ragged:
            targets[1 + index % (LENGTH - 1) :] = -100
        return {"tokens": tokens, "targets": targets}


def build(config: dict[str, Any], context: RecipeContext) -> Recipe:
    del context
    oddity = config.get("oddity", "none")

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        if oddity == "raises" and torch.is_grad_enabled():
            raise KeyError("a mistake in somebody's loss")
        logits = model(batch["tokens"])
        total = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum", ignore_index=-100)
        if oddity == "infinite_gradient":
            total = total + (logits.float().sum() * 0).sqrt()  # finite itself, with an infinite slope
        if oddity == "leaves" and torch.is_grad_enabled():
            sys.exit(0)
        if oddity == "not_a_number":
            total = total * float("nan")
        return total, (batch["targets"] != -100).sum()

    return Recipe(
        build_model=lambda: Model(oddity),
        samples=Samples(ragged=oddity.startswith("ragged")),
        evaluation=Samples(ragged=False) if config.get("brings_evaluation") else None,
        loss=loss,
        blocks=(lambda model: list(model.blocks)) if oddity.startswith("mixed") else None,  # of several classes
        count_tokens=(lambda batch: int((batch["targets"] != -100).sum())) if oddity == "ragged_counted" else None,
    )
