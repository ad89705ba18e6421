"""From a recipe to a model and optimizer laid out over the ranks. The order of the moves is the point of this file."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ctj_api.spec import Offload, Strategy, Training
from ctj_trainer.recipe import Recipe, blocks_of
from ctj_trainer.strategies.foundation import build_inner
from ctj_trainer.strategies.prepared import Prepared

Place = Callable[[nn.Module, Strategy], None]
"""Compile the recipe's module in place; called when every hook inside a block is final."""


def prepare(  # noqa: PLR0913  # seven independent facts; only the worker calls it
    strategy: Strategy,
    recipe: Recipe,
    *,
    training: Training,
    micro_batch_size: int,
    device: torch.device,
    place: Place | None,
    offload: Offload = Offload.NONE,
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
    layout = _Layout(training=training, micro_batch_size=micro_batch_size, device=device, offload=offload)
    return _LAYOUTS[strategy](inner, blocks, layout)


@dataclass(frozen=True, kw_only=True)
class _Layout:
    training: Training
    micro_batch_size: int
    device: torch.device
    offload: Offload


def _single(inner: nn.Module, blocks: list[nn.Module], layout: _Layout) -> Prepared:
    del blocks
    from ctj_trainer.strategies.single import Single

    inner.to(layout.device)
    return Single(inner, inner, layout.training)


def _ddp(inner: nn.Module, blocks: list[nn.Module], layout: _Layout) -> Prepared:
    del blocks
    from ctj_trainer.strategies.ddp import Ddp

    inner.to(layout.device)
    return Ddp(inner, layout.training, device=layout.device)


def _fsdp(inner: nn.Module, blocks: list[nn.Module], layout: _Layout) -> Prepared:
    from ctj_trainer.strategies.fsdp import Fsdp

    return Fsdp(inner, blocks, layout.training, device=layout.device, offload=layout.offload)


def _zero3(inner: nn.Module, blocks: list[nn.Module], layout: _Layout) -> Prepared:
    del blocks
    from ctj_trainer.strategies.zero3 import Zero3

    return Zero3(
        inner,
        layout.training,
        micro_batch_size=layout.micro_batch_size,
        device=layout.device,
        offload=layout.offload,
    )


_LAYOUTS = {Strategy.SINGLE: _single, Strategy.DDP: _ddp, Strategy.FSDP: _fsdp, Strategy.ZERO3: _zero3}
