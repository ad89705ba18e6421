"""What does one process of a stage hold, and gather, besides activations? Parameters, gradients, AdamW, buffers.

Pure arithmetic on element counts, one function for each strategy. `make bench-memory` holds it against real tensors and
counted allocations: the three states to a tenth, the peak to a quarter. Half precision changes nothing here: autocast
leaves parameters, gradients and optimizer in fp32, and its casts are activations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from ctj_api.spec import Offload, Strategy

FP32 = 4
ADAM = 2 * FP32  # exp_avg and exp_avg_sq
# strategies/zero3.py: gradients wait in a bucket of this many elements, or of the whole model if that is smaller.
ZERO3_BUCKET_ELEMENTS = 50_000_000


@dataclass(frozen=True, kw_only=True)
class Part:
    """Elements of a block, or of what is outside all blocks."""

    parameters: int
    trainable: int

    @classmethod
    def of(cls, tensors: Sequence[nn.Parameter]) -> "Part":
        """Add up."""
        return cls(
            parameters=sum(p.numel() for p in tensors), trainable=sum(p.numel() for p in tensors if p.requires_grad)
        )


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """What of a model matters for its memory, in elements; a parameter with two names counts once."""

    blocks: tuple[Part, ...]
    outside: Part
    largest_parameter: int

    @classmethod
    def of(cls, model: nn.Module, blocks: Sequence[nn.Module]) -> "ModelSize":
        """Count a model, which may be on the meta device."""
        inside = {id(p) for block in blocks for p in block.parameters()}
        return cls(
            blocks=tuple(Part.of(list(block.parameters())) for block in blocks),
            outside=Part.of([p for p in model.parameters() if id(p) not in inside]),
            largest_parameter=max((p.numel() for p in model.parameters()), default=0),
        )

    @property
    def parameters(self) -> int:
        """All elements."""
        return self.outside.parameters + sum(block.parameters for block in self.blocks)

    @property
    def trainable(self) -> int:
        """Elements that get gradients."""
        return self.outside.trainable + sum(block.trainable for block in self.blocks)

    @property
    def largest_block(self) -> int:
        """Elements that are gathered at once."""
        return max((block.parameters for block in self.blocks), default=0)


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes of one process between backward and update, and what comes on top for a while."""

    parameters: int
    gradients: int
    optimizer: int
    """AdamW's moments, and ZeRO-3's own copy of the weights that it updates."""
    gradients_stay: bool
    """Whether gradient memory is held through forward and backward too, instead of appearing block by block."""
    buffers: int = 0
    """For communication; held all the time."""
    gathered: int = 0
    """Whole parameters and gradients of what is computed now, and the same on its way; at any time of the step."""
    flushed: int = 0
    """For communication after the last block's backward."""
    flushes_early: bool = False
    """Whether that happens during backward already, for want of room in the buffers."""

    @property
    def held(self) -> int:
        """Parameters, gradients and optimizer."""
        return self.parameters + self.gradients + self.optimizer


def states_of(size: ModelSize, strategy: Strategy, world_size: int) -> States:
    """Lay a model out."""
    if strategy in (Strategy.SINGLE, Strategy.DDP):
        return _whole(size, strategy)
    return _fsdp(size, world_size) if strategy is Strategy.FSDP else _zero3(size, world_size)


def _whole(size: ModelSize, strategy: Strategy) -> States:
    """Everything on every process. DDP's buckets are its gradients (views), held all the time; each new gradient lies
    beside its bucket until it is copied."""
    is_ddp = strategy is Strategy.DDP
    return States(
        parameters=size.parameters * FP32,
        gradients=size.trainable * FP32,
        optimizer=size.trainable * ADAM,
        gradients_stay=is_ddp,
    )


def _fsdp(size: ModelSize, world: int) -> States:
    """Shards. Whole: what is outside the blocks with its gradient (FSDP2 keeps the root gathered), one block and the
    prefetched next one, a block's gradient, its copy that is reduced, and this process's share of the result (Zhao et
    al. 2023, "PyTorch FSDP", section 3)."""
    whole = size.outside.parameters + size.outside.trainable + 4 * size.largest_block + size.largest_block // world
    return States(
        parameters=size.parameters * FP32 // world,
        gradients=size.trainable * FP32 // world,
        optimizer=size.trainable * ADAM // world,
        gradients_stay=False,
        gathered=whole * FP32,
    )


def _zero3(size: ModelSize, world: int) -> States:
    """Shards of weights, of DeepSpeed's own fp32 copy (in fp32 runs too), gradients and moments (Rajbhandari et al.
    2020, "ZeRO", section 3.1), and the bucket in which whole gradients wait. Reducing a bucket takes a padded copy, the
    flat one and this process's share."""
    bucket = min(size.trainable, ZERO3_BUCKET_ELEMENTS)
    whole = size.outside.parameters + size.outside.trainable + 3 * size.largest_block
    return States(
        parameters=size.parameters * FP32 // world,
        gradients=size.trainable * FP32 // world,
        optimizer=size.trainable * (FP32 + ADAM) // world,
        gradients_stay=True,
        buffers=bucket * FP32,
        gathered=whole * FP32,
        flushed=(2 * bucket + bucket // world) * FP32,
        flushes_early=bucket < size.trainable,
    )


def offloaded(states: States, offload: Offload) -> States:
    """Return what stays on the accelerator; what is computed now is gathered there all the same.

    FSDP2 keeps shards, their gradients and so the update itself on the host. ZeRO-3 does that with the shards of the
    weights alone, or also with its fp32 copy, the moments and the gradients they are updated with.
    """
    if offload is Offload.NONE:
        return states
    if offload is Offload.PARAMETERS:
        return replace(states, parameters=0)
    return replace(states, parameters=0, gradients=0, optimizer=0, gradients_stay=True)


def host_bytes(states: States, offload: Offload) -> int:
    """Return what one process puts into the host's memory instead."""
    return states.held - offloaded(states, offload).held
