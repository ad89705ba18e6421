"""A recipe whose blocks carry hooks that move and seed, and which adds another one while it trains."""

import dataclasses
from typing import Any

import torch
from tests.trainer import odd_recipes
from tests.trainer.hooked_models import moved_by_own_hook, seeded_by_torch_hook
from torch import Tensor, nn

from ctj_trainer.recipe import Batch, Recipe, RecipeContext


def build(config: dict[str, Any], context: RecipeContext) -> Recipe:
    plain = odd_recipes.build({}, context)
    backwards = iter(range(1000))

    def build_model() -> nn.Module:
        model = plain.build_model()
        for block in model.blocks if config["hooks"] else ():
            moved_by_own_hook(block)
            seeded_by_torch_hook(block)
        return model

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        if config["late"] and torch.is_grad_enabled() and next(backwards) == 8:
            inner = next(module for module in model.modules() if isinstance(module, odd_recipes.Model))
            inner.blocks[0].linear.register_forward_hook(lambda *_: None)
        return plain.loss(model, batch)

    return dataclasses.replace(plain, build_model=build_model, loss=loss)
