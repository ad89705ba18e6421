"""What a recipe gives the trainer: a model, data addressed by sample index, and a loss. Built-in or `module:function`.

A recipe function has the signature `build(config: dict, context: RecipeContext) -> Recipe`. It checks its own config and
raises `RecipeError` with every problem at once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

Batch = Mapping[str, Tensor]


class RecipeError(ValueError):
    """The recipe's config is wrong; the message names path, value, rule and remedy, all problems at once."""


class Samples(Protocol):
    """A finite data set addressed by index: `samples[i]` is always the same sample."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Batch:
        """Return one sample without batch dimension."""


@dataclass(frozen=True, kw_only=True)
class RecipeContext:
    """What a recipe may know about its run. `device` is where batches will be moved by the trainer."""

    device: torch.device
    seed: int


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything the trainer needs to know about one training task."""

    build_model: Callable[[], nn.Module]
    """Build on the current default device (also under `torch.device("meta")`), initialised from the current RNG or
    from local weights."""
    samples: Samples
    loss: Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]
    """(model, batch) -> (sum of token losses, number of tokens), both scalar tensors. A sum, so that ragged batches give
    the same mean for every split over processes."""
    export: Callable[[dict[str, Tensor], Path], None] | None = None
    """Write a full state dict (clean names, CPU) as files other tools load."""
