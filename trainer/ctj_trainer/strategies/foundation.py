"""What happens to a model under every strategy before it is laid out: same weights, precision and recomputing."""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ctj_api.spec import ActivationCheckpointing, Precision, Training
from ctj_trainer.recipe import Recipe, blocks_of


def build_inner(recipe: Recipe, training: Training, *, device: torch.device) -> nn.Module:
    """Build the recipe's module on the CPU, seeded, so that no strategy or device starts from other weights."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(training.seed)
        model = recipe.build_model()
    model.train()
    if training.activation_checkpointing is ActivationCheckpointing.BLOCKS:
        for block in blocks_of(model, recipe):
            recompute_in_backward(block)
    if training.precision is Precision.BF16:
        run_in_bf16(model, device_type=device.type)
    return model


def recompute_in_backward(block: nn.Module) -> None:
    """Keep only the block's inputs for the backward. In place: a wrapper module would change every parameter's name."""
    original = block.forward

    def forward(*inputs: Any, **keywords: Any) -> Any:
        return checkpoint(original, *inputs, use_reentrant=False, **keywords)

    block.forward = forward


def run_in_bf16(model: nn.Module, *, device_type: str) -> None:
    """Compute in bf16 with fp32 weights, gradients and optimizer, under every strategy alike.

    Autocast sits inside the forward, so the loop, the loss and the backward know nothing of it (and DeepSpeed, which
    switches autocast off around its module, cannot). No cache of cast weights: under sharding it would hold every
    block's gathered weights until the end of the forward.
    """
    forward = torch.autocast(device_type, dtype=torch.bfloat16, cache_enabled=False)(model.forward)
    model.forward = forward


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers under the names a checkpoint uses; a tied parameter appears once."""
    names = {name for name, _ in model.named_parameters()}
    persistent = set(model.state_dict(keep_vars=True)) - {
        name for name, _ in model.named_parameters(remove_duplicate=False)
    }
    tensors: dict[str, torch.Tensor] = {name: p for name, p in model.named_parameters() if name in names}
    tensors.update({name: buffer for name, buffer in model.named_buffers() if name in persistent})
    return tensors
