"""From a recipe to a model and optimizer laid out over the ranks. The order of the moves is the point of this file."""

from collections.abc import Callable

import torch
from torch import nn

from ctj_api.spec import Strategy, Training
from ctj_trainer.recipe import Recipe, blocks_of
from ctj_trainer.strategies.foundation import build_inner
from ctj_trainer.strategies.prepared import Prepared

Place = Callable[[nn.Module, Strategy], None]
"""Compile the recipe's module in place; called when every hook inside a block is final."""


def prepare(  # noqa: PLR0913  # six independent facts; only the worker calls it
    strategy: Strategy,
    recipe: Recipe,
    *,
    training: Training,
    micro_batch_size: int,
    device: torch.device,
    place: Place | None,
) -> Prepared:
    """Build, compile in place and lay out a model. Collective; the default process group must exist but for `single`.

    Hooks must be final before the first compiled call: single and DDP compile the inner module and then wrap; FSDP2
    compiles blocks and then shards them; ZeRO-3 makes blocks leaves, compiles their forward, and then initialises.

    Raises:
        StrategyUnavailableError: the strategy's library is not installed.
    """
    inner = build_inner(recipe, training, device=device)
    blocks = blocks_of(inner, recipe)
    if strategy is Strategy.ZERO3:
        from ctj_trainer.strategies.zero3 import make_leaves

        make_leaves(inner, blocks, device=device)
    if place is not None:
        place(inner, strategy)
    return _LAYOUTS[strategy](inner, blocks, training, micro_batch_size, device)


def _single(
    inner: nn.Module, blocks: list[nn.Module], training: Training, micro: int, device: torch.device
) -> Prepared:
    del blocks, micro
    from ctj_trainer.strategies.single import Single

    inner.to(device)
    return Single(inner, inner, training)


def _ddp(inner: nn.Module, blocks: list[nn.Module], training: Training, micro: int, device: torch.device) -> Prepared:
    del blocks, micro
    from ctj_trainer.strategies.ddp import Ddp

    inner.to(device)
    return Ddp(inner, training, device=device)


def _fsdp(inner: nn.Module, blocks: list[nn.Module], training: Training, micro: int, device: torch.device) -> Prepared:
    del micro
    from ctj_trainer.strategies.fsdp import Fsdp

    return Fsdp(inner, blocks, training, device=device)


def _zero3(inner: nn.Module, blocks: list[nn.Module], training: Training, micro: int, device: torch.device) -> Prepared:
    del blocks
    from ctj_trainer.strategies.zero3 import Zero3

    return Zero3(inner, training, micro_batch_size=micro, device=device)


_LAYOUTS = {Strategy.SINGLE: _single, Strategy.DDP: _ddp, Strategy.FSDP: _fsdp, Strategy.ZERO3: _zero3}
