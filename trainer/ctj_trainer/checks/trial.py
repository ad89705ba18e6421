"""One model with the call and the loss it is trained by: what the checks that run something run.

Everything runs on the CPU, eagerly or with a backend that compiles nothing, on one small batch.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ctj_trainer.recipe import Recipe, blocks_of, collate


def _no_blocks(_: nn.Module) -> list[nn.Module]:
    return []


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A model, one call of it, and its loss. Models are built anew for each check: checks change them."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]
    """Runs the model on the trial's batch; a scalar."""
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    blocks: Callable[[nn.Module], list[nn.Module]] = _no_blocks
    """The repeated blocks: regions and units. None: the model is one."""

    @classmethod
    def of(cls, build: Callable[[], nn.Module], *arguments: Any, **keywords: Any) -> "Trial":
        """Try a model on these arguments, with the sum of its output as loss."""

        def seeded() -> nn.Module:
            return _seeded(build)

        def loss(model: nn.Module) -> Tensor:
            output = model(*_copied(arguments), **_copied(keywords))
            total: Tensor = (output[0] if isinstance(output, tuple) else output).float().sum()
            return total

        return cls(build=seeded, loss=loss, arguments=arguments, keywords=keywords)

    @classmethod
    def of_recipe(cls, recipe: Recipe, *, batch_size: int = 2) -> "Trial":
        """Try a recipe's model on its first samples, with the recipe's own loss."""
        batch = collate(recipe.samples, range(min(batch_size, len(recipe.samples))))

        def build() -> nn.Module:
            return _seeded(recipe.build_model).train()

        def loss(model: nn.Module) -> Tensor:
            return recipe.loss(model, _copied(batch))[0]

        def blocks(model: nn.Module) -> list[nn.Module]:
            return blocks_of(model, recipe)

        arguments, keywords = _first_call(build(), loss)
        return cls(build=build, loss=loss, arguments=arguments, keywords=keywords, blocks=blocks)

    def call(self, model: nn.Module) -> Any:
        """Call the model as its loss does."""
        return model(*_copied(self.arguments), **_copied(self.keywords))


def _first_call(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        seen.append((_copied(arguments), _copied(keywords)))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        loss(model)
    handle.remove()
    return seen[0] if seen else ((), {})


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """Build with the same weights each time, so that forms and orders can be compared."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build()


def _copied(value: Any) -> Any:
    return copy.deepcopy(value)
