"""What did `prepare` make of a model? Told from the object itself: Accelerate turns FSDP into DDP on a CPU unasked."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from ctj_api.spec import Strategy
from ctj_trainer.compile.blocks import repeated_blocks

_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine", "DataParallel"}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A model's own module below its wrappers, how it is laid out, and why it must stay eager (empty: it need not)."""

    inner: nn.Module
    strategy: Strategy
    stays_eager: str = ""


def layout_of(model: nn.Module) -> Layout:
    """Look at a model that may be wrapped by DDP, FSDP or DeepSpeed. Imports none of them."""
    inner, zero_stage, wrappers = model, None, set[str]()
    while kind := _wrapper(inner):
        wrappers.add(kind)
        if kind == "DeepSpeedEngine":
            zero_stage = _zero_stage(inner)
        inner = inner.module  # type: ignore[assignment]
    if "FullyShardedDataParallel" in wrappers:
        why = "FSDP1 and the compiler fail together; use FSDP2 (fsdp_version: 2)"
        return Layout(inner=inner, strategy=Strategy.FSDP, stays_eager=why)
    if zero_stage == 3:
        return Layout(inner=inner, strategy=Strategy.ZERO3, stays_eager=_why_zero3_stays_eager(inner))
    if wrappers:
        return Layout(inner=inner, strategy=Strategy.DDP)
    is_sharded = any("FSDPModule" in _ancestors(module) for module in inner.modules())
    return Layout(inner=inner, strategy=Strategy.FSDP if is_sharded else Strategy.SINGLE)


def _why_zero3_stays_eager(inner: nn.Module) -> str:
    """ZeRO-3's hooks inside a block recompile without end (33 times, measured) unless the block is a leaf to it."""
    from deepspeed.utils import z3_leaf_module

    blocks = repeated_blocks(inner)
    if blocks and all(z3_leaf_module(block) for block in blocks):
        return ""
    return (
        "under ZeRO-3 blocks must become leaves before deepspeed.initialize; "
        "hand the model to safe_compile_with_accelerate before it is prepared"
    )


def _wrapper(module: nn.Module) -> str:
    found = _WRAPPERS & _ancestors(module)
    return next(iter(found)) if found and isinstance(getattr(module, "module", None), nn.Module) else ""


def _ancestors(module: nn.Module) -> set[str]:
    return {cls.__name__ for cls in type(module).__mro__}


def _zero_stage(engine: Any) -> int:
    return int(engine.zero_optimization_stage())
