"""How much memory will one process of each stage need at its peak? Answered before anything is allocated.

Parameters, gradients and AdamW's state are counted exactly from the meta-device model and laid out as each strategy
does it. Activations are counted, not estimated from a formula: one forward on fake tensors records what autograd would
keep (a forward on the meta device itself would choose the slow attention and overstate it fourfold at length 256).
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ctj_api.report import MemoryPrediction
from ctj_api.spec import ActivationCheckpointing, Precision, Stage, Strategy, Training
from ctj_trainer.memory import process_limit
from ctj_trainer.strategies.foundation import HALF

Loss = Callable[[nn.Module, Mapping[str, Tensor]], tuple[Tensor, Tensor]]

_FP32 = 4
_HALF = 2
_ADAM = 2 * _FP32  # exp_avg and exp_avg_sq, kept in fp32 by every strategy


class CannotPredict(RuntimeError):
    """The model cannot run on fake tensors (its forward looks at values); training is not affected."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """What of a model matters for its memory, in elements."""

    parameters: int
    trainable: int
    largest_block: int
    outside_blocks: int

    @classmethod
    def of(cls, model: nn.Module, blocks: Sequence[nn.Module]) -> "ModelSize":
        """Count each parameter once, also where two names share it."""
        per_block = [sum(p.numel() for p in block.parameters()) for block in blocks]
        parameters = sum(p.numel() for p in model.parameters())
        return cls(
            parameters=parameters,
            trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
            largest_block=max(per_block, default=0),
            outside_blocks=parameters - sum(per_block),
        )


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes autograd keeps from forward to backward: outside blocks, in each block, and at each block's entrance."""

    outside: int
    inside: tuple[int, ...]
    entrances: tuple[int, ...]
    largest: int

    def peak(self, checkpointing: ActivationCheckpointing) -> int:
        """Bytes at the turn from forward to backward, plus the gradient of the largest kept tensor.

        Checkpointed blocks keep their entrance only, and one block at a time is recomputed (Chen et al. 2016,
        "Training deep nets with sublinear memory cost").
        """
        if checkpointing is ActivationCheckpointing.BLOCKS and self.inside:
            return self.outside + sum(self.entrances) + max(self.inside) + self.largest
        return self.outside + sum(self.inside) + self.largest


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one process runs: `sample` is one sample without batch dimension; `blocks` are the repeated layers."""

    loss: Loss
    sample: Mapping[str, Tensor]
    blocks: Sequence[nn.Module]
    micro_batch_size: int
    device: torch.device


def predict_memory(
    model: nn.Module,
    workload: Workload,
    *,
    ladder: Sequence[Stage],
    training: Training,
    baseline_bytes: int = 0,
) -> list[MemoryPrediction]:
    """Predict every stage's peak per process from a model built on the meta device.

    `baseline_bytes` is what the process holds already: on CPU the interpreter and its libraries, which the measured
    peak will contain.

    Raises:
        CannotPredict: the forward does not run on fake tensors.
    """
    size = ModelSize.of(model, workload.blocks)
    activations = count_activations(model, workload, training.precision).peak(training.activation_checkpointing)
    fixed = baseline_bytes + activations
    return [
        MemoryPrediction(
            stage=stage.name,
            predicted_bytes=fixed + state_bytes(size, stage=stage, precision=training.precision),
            limit_bytes=process_limit(workload.device, local_processes=stage.local_processes),
        )
        for stage in ladder
    ]


def state_bytes(size: ModelSize, *, stage: Stage, precision: Precision) -> int:
    """Bytes of parameters, gradients and optimizer state in one process, with what a strategy gathers at its peak."""
    if stage.strategy in (Strategy.SINGLE, Strategy.DDP):
        # DDP's buckets are views of the gradients (gradient_as_bucket_view), so that it needs no more than single.
        return size.parameters * _FP32 + size.trainable * (_FP32 + _ADAM)
    if stage.strategy is Strategy.FSDP:
        return _fsdp_bytes(size, stage.world_size, precision)
    return _zero3_bytes(size, stage.world_size, precision)


def _fsdp_bytes(size: ModelSize, world: int, precision: Precision) -> int:
    """Shards in fp32; gathered at the peak: the root group for the whole step, one block and the prefetched next one,
    and one block's unsharded gradient (Zhao et al. 2023, "PyTorch FSDP", section 3; FSDP2 keeps the root gathered)."""
    wide = _FP32 if precision is Precision.FP32 else _HALF
    sharded = (size.parameters * _FP32 + size.trainable * (_FP32 + _ADAM)) // world
    gathered = (size.outside_blocks + 2 * size.largest_block) * wide + size.largest_block * wide
    return sharded + gathered


def _zero3_bytes(size: ModelSize, world: int, precision: Precision) -> int:
    """Shards of working weights, their fp32 copy, gradients and AdamW's state (Rajbhandari et al. 2020, "ZeRO", section
    3.1: 2 + 2 + 12 bytes; DeepSpeed keeps the fp32 copy in fp32 runs too), and one gathered block with its gradient."""
    work = _FP32 if precision is Precision.FP32 else _HALF
    sharded = (size.parameters * work + size.trainable * (work + _FP32 + _ADAM)) // world
    return sharded + (size.outside_blocks + 2 * size.largest_block) * work


def count_activations(model: nn.Module, workload: Workload, precision: Precision) -> Activations:
    """Run one forward of a micro batch on fake tensors and add up what autograd keeps for the backward.

    Raises:
        CannotPredict: the forward does not run on fake tensors.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # private, but what torch's own memory tools use

    blocks = {name for name, module in model.named_modules() if any(module is block for block in workload.blocks)}
    device, micro = workload.device, workload.micro_batch_size
    autocast = torch.autocast(device.type, HALF[precision]) if precision in HALF else nullcontext()
    twin = copy.deepcopy(model)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), autocast:
            _make_fake(twin, device)
            counter = _SavedBytes(twin, blocks)
            batch = {
                key: torch.empty((micro, *tensor.shape), dtype=tensor.dtype, device=device)
                for key, tensor in workload.sample.items()
            }
            with torch.autograd.graph.saved_tensors_hooks(counter.saved, lambda tensor: tensor):
                workload.loss(twin, batch)
    except Exception as error:
        raise CannotPredict(f"memory prediction: {type(error).__name__}: {error}") from error
    return counter.total()


def _make_fake(model: nn.Module, device: torch.device) -> None:
    """Replace every tensor of a meta model by a fake one on `device`; tied parameters stay one tensor."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in made:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


class _SavedBytes:
    """Counts each storage once, in the block that saved it first; parameters and buffers are counted elsewhere."""

    def __init__(self, model: nn.Module, blocks: set[str]) -> None:
        self._bytes: dict[str, int] = {"": 0}
        self._entrances: dict[str, int] = {}
        self._largest = 0
        self._current = ""
        self._storages: list[Any] = []  # held, so that no address is used twice
        self._seen = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        for name in blocks:
            self._watch(name, model.get_submodule(name))

    def saved(self, tensor: Tensor) -> Tensor:
        """Note a tensor that autograd keeps."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._storages.append(storage)
            self._bytes[self._current] += storage.nbytes()
            self._largest = max(self._largest, storage.nbytes())
        return tensor

    def total(self) -> Activations:
        """Return the sums."""
        inside = {name: count for name, count in self._bytes.items() if name}
        return Activations(
            outside=self._bytes[""],
            inside=tuple(inside.values()),
            entrances=tuple(self._entrances.values()),
            largest=self._largest,
        )

    def _watch(self, name: str, block: nn.Module) -> None:
        self._bytes[name] = 0

        def enter(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            self._current = name
            self._entrances[name] = sum(
                a.untyped_storage().nbytes() for a in arguments[:1] if isinstance(a, Tensor)
            )  # the first argument is the hidden state; the others are shared by all blocks

        def leave(*_: object) -> None:
            self._current = ""

        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave)
