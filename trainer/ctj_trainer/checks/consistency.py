"""Do dtype, device and layout agree where tensors meet? A mismatch is a cast, a copy or a move in every step."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ctj_trainer.checks.finding import Finding, Rule
from ctj_trainer.checks.trial import Trial

DEVICE = Rule(check="consistency", name="weights, buffers and inputs are on one device")
DTYPE = Rule(check="consistency", name="inputs have the dtype of the weights they meet")
CONTIGUITY = Rule(check="consistency", name="weights and inputs are contiguous")


def check_consistency(trial: Trial) -> list[Finding]:
    """Look at the model's tensors, and at what each module with weights is given."""
    model = trial.build()
    meetings = _inputs_of_modules(model, trial)
    held = [*model.named_parameters(), *model.named_buffers()]
    devices = _devices(held, meetings)
    dtypes = [f for name, module, given in meetings for f in _dtypes(name, module, given)]
    strided = [*_strided_weights(held), *(f for name, _, given in meetings for f in _strided_inputs(name, given))]
    looked_at = f"{len(held)} tensors, inputs of {len(meetings)} modules"
    return [
        *DEVICE.judge(devices, looked_at=looked_at),
        *DTYPE.judge(dtypes, looked_at=looked_at),
        *CONTIGUITY.judge(strided, looked_at=looked_at),
    ]


def _inputs_of_modules(model: nn.Module, trial: Trial) -> list[tuple[str, nn.Module, list[Tensor]]]:
    """Run the model once and note what modules with weights of their own are given."""
    seen: list[tuple[str, nn.Module, list[Tensor]]] = []
    handles = []
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is None:
            continue

        def note(module: nn.Module, given: tuple[Any, ...], name: str = name) -> None:
            seen.append((name, module, [value for value in given if isinstance(value, Tensor)]))

        handles.append(module.register_forward_pre_hook(note))
    try:
        with torch.no_grad():
            trial.call(model)
    except RuntimeError:  # a mismatch that torch refuses: what was seen so far names it
        pass
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _devices(held: list[tuple[str, Tensor]], meetings: list[tuple[str, nn.Module, list[Tensor]]]) -> list[Finding]:
    if not held:
        return []
    usual = max({tensor.device for _, tensor in held}, key=lambda d: sum(t.numel() for _, t in held if t.device == d))
    given = [(f"input of {name}", tensor) for name, _, tensors in meetings for tensor in tensors]
    return [
        DEVICE.fails(
            name,
            evidence=f"{tensor.device} where the model is on {usual}",
            remedy="build it in __init__ and let the trainer move the model; make new tensors with device=x.device",
        )
        for name, tensor in [*held, *given]
        if tensor.device != usual
    ]


def _dtypes(name: str, module: nn.Module, given: list[Tensor]) -> Iterator[Finding]:
    weights = {p.dtype for p in module.parameters(recurse=False) if p.is_floating_point()}
    for tensor in given:
        if weights and tensor.is_floating_point() and tensor.dtype not in weights:
            yield DTYPE.fails(
                name,
                evidence=f"is given {tensor.dtype}, its weights are {', '.join(map(str, sorted(weights, key=str)))}",
                remedy="cast once where the tensor is made, or leave the dtype to autocast",
                rewrite="x = x.to(self.weight.dtype)",
            )


def _strided_weights(held: list[tuple[str, Tensor]]) -> Iterator[Finding]:
    for name, tensor in held:
        if tensor.dim() < 4 and not tensor.is_contiguous():  # 4-D weights may be channels-last on purpose
            yield CONTIGUITY.fails(
                name,
                evidence=f"strides {tuple(tensor.stride())} of shape {tuple(tensor.shape)}",
                remedy="store it contiguous: sharding and buckets copy it in every step",
                rewrite=f"{name}.data = {name}.data.contiguous()",
            )


def _strided_inputs(name: str, given: list[Tensor]) -> Iterator[Finding]:
    for tensor in given:
        # Indices are read once; what is multiplied is copied, or compiled once more for each layout.
        is_strided = tensor.dim() < 4 and tensor.numel() > 1 and not tensor.is_contiguous()
        if tensor.is_floating_point() and is_strided:
            yield CONTIGUITY.fails(
                f"input of {name}",
                evidence=f"strides {tuple(tensor.stride())} of shape {tuple(tensor.shape)}: guarded on, so another "
                "layout is another graph",
                remedy="make it contiguous after the transpose or slice",
                rewrite="x = x.contiguous()",
            )
