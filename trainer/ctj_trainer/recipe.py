"""What a recipe gives the trainer: a model, data addressed by sample index, and a loss. Built-in or `module:function`.

A recipe function has the signature `build(config: dict, context: RecipeContext) -> Recipe`. It checks its own config
and raises `RecipeError` with every problem at once.
"""

import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ctj_trainer.compile.blocks import repeated_blocks

Batch = Mapping[str, Tensor]
BuildRecipe = Callable[[dict[str, Any], "RecipeContext"], "Recipe"]

BUILT_IN = {"causal_lm": "ctj_trainer.recipes.causal_lm:build"}


class RecipeError(ValueError):
    """The recipe's config is wrong; the message names path, value, rule and remedy, all problems at once."""


class DataError(RuntimeError):
    """The data of a recipe is missing or unreadable; another attempt may find it."""


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
    """(model, batch) -> (sum of token losses, number of tokens), both scalar tensors. A sum, so that ragged batches
    give the same mean for every split over processes. Call the model itself, not a part of it: strategies gather
    parameters when it is called."""
    count_tokens: Callable[[Batch], int] | None = None
    """Tokens that `loss` will count in a batch, told before any forward; absent: assumed equal for every sample."""
    export: Callable[[dict[str, Tensor], Path], None] | None = None
    """Write a full state dict (clean names, CPU) as files other tools load."""
    evaluation: Samples | None = None
    """Samples for `spec.training.evaluation`; absent: the last share of `samples` is held out."""
    blocks: Callable[[nn.Module], list[nn.Module]] | None = None
    """The repeated blocks that are compiled, sharded and checkpointed one by one; absent: found by `blocks_of`."""


def load_recipe(name: str, config: dict[str, Any], context: RecipeContext) -> Recipe:
    """Build a recipe: a built-in one, or `module:function` importable from the working folder, PYTHONPATH or the image.

    Raises:
        RecipeError: there is no such recipe, it is no recipe, or its config is wrong.
        DataError: its data is missing.
    """
    build = _import_builder(BUILT_IN.get(name, name), asked_for=name)
    recipe = build(config, context)
    if not isinstance(recipe, Recipe):
        raise RecipeError(
            f"spec.recipe.name is {name!r}: it returned {type(recipe).__name__}; "
            "it must return ctj_trainer.recipe.Recipe; end the function with `return Recipe(...)`"
        )
    return recipe


def collate(samples: Samples, indices: Iterable[int]) -> dict[str, Tensor]:
    """Stack samples to one batch."""
    chosen = [samples[int(index)] for index in indices]
    return {key: torch.stack([sample[key] for sample in chosen]) for key in chosen[0]}


def loss_of(recipe: Recipe, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | float]:
    """Ask the recipe for the loss of a batch: (sum of token losses, number of tokens).

    Raises:
        RecipeError: it answered something else; torch would complain later, and in its own words.
    """
    answer: object = recipe.loss(model, batch)
    if isinstance(answer, tuple | list) and len(answer) == 2:
        total, count = answer
        if _is_scalar(total) and (_is_scalar(count) or isinstance(count, Real)):
            return total, count
    raise RecipeError(
        f"the recipe's loss returned {_described(answer)}; it must return (sum of token losses, number of tokens), "
        "both scalar tensors; end it with `return losses.sum(), mask.sum()`"
    )


def blocks_of(model: nn.Module, recipe: Recipe) -> list[nn.Module]:
    """The model's repeated blocks: what the recipe names, else what `compile/blocks.py` finds.

    An empty list is an answer: nothing repeats, so the whole model is one unit.
    """
    return recipe.blocks(model) if recipe.blocks is not None else repeated_blocks(model)


def _is_scalar(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0


def _described(answer: object) -> str:
    if isinstance(answer, Tensor):
        return f"a tensor of shape {tuple(answer.shape)}"
    if isinstance(answer, tuple | list):
        return f"({', '.join(map(_described, answer))})"
    return type(answer).__name__


def _import_builder(target: str, *, asked_for: str) -> BuildRecipe:
    module_name, separator, function_name = target.partition(":")
    if not separator:
        raise RecipeError(
            f"spec.recipe.name is {asked_for!r}; allowed: {', '.join(sorted(BUILT_IN))}, or module:function of your own"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise RecipeError(
            f"spec.recipe.name is {asked_for!r}: importing {module_name} failed ({error}); it must be importable from "
            f"the working folder ({os.getcwd()}), PYTHONPATH or the image; put it into one of them or install it"
        ) from error
    build = getattr(module, function_name, None)
    if not callable(build):
        functions = sorted(n for n, f in vars(module).items() if inspect.isfunction(f) and not n.startswith("_"))
        raise RecipeError(
            f"spec.recipe.name is {asked_for!r}: {module_name} has no function {function_name}; "
            f"it has: {', '.join(functions) or 'no functions'}"
        )
    return build  # type: ignore[no-any-return]  # its result is checked by load_recipe
