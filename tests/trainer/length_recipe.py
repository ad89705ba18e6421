"""A recipe whose samples have eight lengths, in random order: `tests.trainer.length_recipe:build`. One at a time."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctj_trainer.recipe import Batch, Recipe, RecipeContext

LENGTHS = (6, 8, 12, 16, 20, 24, 28, 32)
NUM_SAMPLES = 64
WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Samples:
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[Batch]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(16, (LENGTHS[index % len(LENGTHS)],), generator=generator)
        return {"tokens": tokens, "targets": tokens.flip(0)}


def build(config: dict[str, Any], context: RecipeContext) -> Recipe:
    del config, context

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = model(batch["tokens"])
        total = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
        return total, torch.tensor(batch["targets"].numel())

    return Recipe(
        build_model=Model, samples=Samples(), loss=loss, count_tokens=lambda batch: int(batch["targets"].numel())
    )
