"""How much memory will one process of each stage need at its peak? Answered before anything is allocated.

Parameters, gradients and AdamW's state are counted from the meta-device model and laid out as each strategy does it
(`memory_states.py`). Activations are counted, not estimated from a formula: one forward on fake tensors records what
autograd would keep (a forward on the meta device itself would choose the slow attention and overstate it fourfold at
length 256). The peak is looked for along the backward, where activations go as gradients come.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ctj_api.report import MemoryPrediction
from ctj_api.spec import ActivationCheckpointing, Precision, Stage, Training
from ctj_trainer.memory import process_limit
from ctj_trainer.memory_states import FP32, ModelSize, States, offloaded, states_of
from ctj_trainer.strategies.foundation import HALF

Loss = Callable[[nn.Module, Mapping[str, Tensor]], tuple[Tensor, Tensor]]


class CannotPredict(RuntimeError):
    """The model cannot run on fake tensors (its forward looks at values); training is not affected."""


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes autograd keeps from forward to backward: outside blocks, in each block, and at each block's entrance."""

    outside: int
    inside: tuple[int, ...]
    entrances: tuple[int, ...]
    largest: int

    def along_backward(self, checkpointing: ActivationCheckpointing) -> list[int]:
        """Bytes kept at the start of backward, and while each block's gradients are made, the last block first.

        Checkpointed blocks keep their entrance only, and one block at a time is recomputed (Chen et al. 2016,
        "Training deep nets with sublinear memory cost").
        """
        if checkpointing is ActivationCheckpointing.NONE:
            return [self.outside + sum(self.inside), *(sum(self.inside[: k + 1]) for k in self._last_first)]
        recomputed = (sum(self.entrances[: k + 1]) + self.inside[k] for k in self._last_first)
        return [self.outside + sum(self.entrances), *recomputed]

    @property
    def _last_first(self) -> range:
        return range(len(self.inside) - 1, -1, -1)


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
    activations = count_activations(model, workload, training.precision)
    return [
        MemoryPrediction(
            stage=stage.name,
            predicted_bytes=baseline_bytes
            + peak_bytes(
                _states(size, stage, workload.device),
                size,
                activations,
                checkpointing=training.activation_checkpointing,
            ),
            limit_bytes=process_limit(workload.device, local_processes=stage.local_processes),
        )
        for stage in ladder
    ]


def _states(size: ModelSize, stage: Stage, device: torch.device) -> States:
    """On a CPU offloading moves nothing: the host's memory is the device's."""
    states = states_of(size, stage.strategy, stage.world_size)
    return states if device.type == "cpu" else offloaded(states, stage.offload)


def peak_bytes(
    states: States, size: ModelSize, activations: Activations, *, checkpointing: ActivationCheckpointing
) -> int:
    """Find the largest sum along a step: at the turn to backward, in each block's backward, and before the update."""
    steady = states.parameters + states.optimizer + states.buffers + (states.gradients if states.gradients_stay else 0)
    grown = 0 if states.gradients_stay else states.gradients / max(size.trainable, 1)  # bytes for each element
    # Two tensors of the largest kind on the way (a gradient and what it is made from); or a whole gradient beside its
    # bucket.
    passing = max(2 * activations.largest, size.largest_parameter * FP32 if states.gradients_stay else 0)
    done = [0, *_done(size)]
    kept = activations.along_backward(checkpointing)
    moments = [bytes_ + grown * elements for bytes_, elements in zip(kept, done, strict=False)]
    backward = max(moments) + passing + states.gathered + (states.flushed if states.flushes_early else 0)
    return steady + int(max(backward, grown * size.trainable + states.gathered, states.flushed))


def _done(size: ModelSize) -> list[int]:
    """Elements that have their gradient when each block's backward starts, the last block first."""
    done, total = [], size.outside.trainable
    for block in reversed(size.blocks):
        done.append(total)
        total += block.trainable
    return done


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
