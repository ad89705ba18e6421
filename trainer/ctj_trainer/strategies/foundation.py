"""What happens to a model under every strategy before it is laid out: same weights, precision and recomputing."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ctj_api.spec import ActivationCheckpointing, Precision, Training
from ctj_trainer.recipe import Recipe, blocks_of

log = logging.getLogger("ctj")
HALF = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


def build_inner(recipe: Recipe, training: Training, *, device: torch.device) -> nn.Module:
    """Build the recipe's module on the CPU, seeded, so that no strategy or device starts from other weights."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(training.seed)
        model = as_written(recipe.build_model())
    model.train()
    if training.activation_checkpointing is ActivationCheckpointing.BLOCKS:
        for block in blocks_of(model, recipe):
            recompute_in_backward(block)
    if training.precision in HALF:
        run_in_half(model, device_type=device.type, dtype=HALF[training.precision])
    return model


def as_written(model: nn.Module) -> nn.Module:
    """Undo what a recipe has compiled itself: it would be compiled twice, and names and signature are a wrapper's."""
    from ctj_trainer.compile.entry import unwrapped

    model, undone = unwrapped(model)
    if undone:
        log.info("notice: the recipe's model came compiled (%s): undone, the policy decides", ", ".join(undone[:3]))
    return model


class PrecisionUnavailableError(RuntimeError):
    """The device cannot compute an operation of the model in the chosen precision."""


# torch's own kernels, its linear algebra, its FFT; oneDNN's (an LSTM that is fed fp32).
_NO_KERNEL = ("not implemented for 'Half'", "Got Half", "dtype Half", "could not create a primitive")


def no_kernel(error: BaseException, training: Training) -> PrecisionUnavailableError | None:
    """Say what to do where fp16 meets an operation without a kernel for it; None for any other error."""
    if training.precision is not Precision.FP16 or not any(text in str(error) for text in _NO_KERNEL):
        return None
    return PrecisionUnavailableError(
        f"spec.training.precision is fp16: an operation of the model has no fp16 kernel on this device "
        f"({str(error).splitlines()[0][:200]}); use bf16 or fp32"
    )


def recompute_in_backward(block: nn.Module) -> None:
    """Keep only the block's inputs for the backward. In place: a wrapper module would change every parameter's name."""
    original = block.forward

    def forward(*inputs: Any, **keywords: Any) -> Any:
        return checkpoint(original, *inputs, use_reentrant=False, **keywords)

    block.forward = forward


def run_in_half(model: nn.Module, *, device_type: str, dtype: torch.dtype) -> None:
    """Compute in two bytes with fp32 weights, gradients and optimizer, under every strategy alike.

    Autocast sits inside the forward, so the loop, the loss and the backward know nothing of it (and DeepSpeed, which
    switches autocast off around its module, cannot). No cache of cast weights: under sharding it would hold every
    block's gathered weights until the end of the forward.
    """
    forward = torch.autocast(device_type, dtype=dtype, cache_enabled=False)(model.forward)
    model.forward = forward


@contextmanager
def forward_only(model: nn.Module) -> Iterator[None]:
    """Record no gradient and leave out what is random or keeps statistics."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers under the names a checkpoint uses; a tied parameter appears once."""
    names = {name for name, _ in model.named_parameters()}
    persistent = set(model.state_dict(keep_vars=True)) - {
        name for name, _ in model.named_parameters(remove_duplicate=False)
    }
    tensors: dict[str, torch.Tensor] = {name: p for name, p in model.named_parameters() if name in names}
    tensors.update({name: buffer for name, buffer in model.named_buffers() if name in persistent})
    return tensors
