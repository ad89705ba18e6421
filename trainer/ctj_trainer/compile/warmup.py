"""Every rank compiles before the first step, on the shapes to come, and waits for the others outside of any collective.

A rank with a cold cache may need minutes more than its peers. In a gradient's all-reduce they would time out and blame
the network; here the wait has its own limit, and its error names the rank.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ctj_trainer.compile.policy import CompileConfigError
from ctj_trainer.ranks import Ranks

Rehearsal = Callable[[Mapping[str, Tensor]], None]
"""Forward and backward of one batch, without an update."""


def warm_up(rehearse: Rehearsal, batches: Sequence[Mapping[str, Tensor]], *, inner: nn.Module, ranks: Ranks) -> float:
    """Compile for each batch; returns the seconds it took here.

    Leaves weights, buffers, generators and optimizer as they were. Collective where the strategy is in every pass.
    """
    began = time.perf_counter()
    with _unchanged(inner, ranks.device):
        for batch in batches:
            rehearse(batch)
    return time.perf_counter() - began


def shaped(batch: Mapping[str, Tensor], sizes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Return `batch` with some tensors in other sizes, filled with their own values: token ids stay token ids.

    Raises:
        CompileConfigError: a tensor is not in the batch, or has another number of dimensions.
    """
    problems = [text for name, wanted in sizes.items() if (text := _mismatch(batch, name, wanted))]
    if problems:
        raise CompileConfigError(problems)
    return {**batch, **{name: _resized(batch[name], wanted) for name, wanted in sizes.items()}}


def _mismatch(batch: Mapping[str, Tensor], name: str, sizes: Sequence[int]) -> str:
    if name not in batch:
        return f"shapes names {name!r}; the batch has {', '.join(sorted(batch))}; correct the name"
    if batch[name].dim() != len(sizes) or not batch[name].numel():
        return f"shapes.{name} is {list(sizes)}; the batch's is {list(batch[name].shape)}; give as many sizes"
    return ""


def _resized(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    for dim, size in enumerate(sizes):
        places = torch.arange(size, device=tensor.device) % tensor.shape[dim]
        tensor = tensor.index_select(dim, places)
    return tensor


@contextmanager
def _unchanged(inner: nn.Module, device: torch.device) -> Iterator[None]:
    """Put buffers and generators back (BatchNorm moves its statistics in every forward)."""
    before = {name: buffer.clone() for name, buffer in inner.named_buffers()}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    with torch.no_grad():
        for name, buffer in inner.named_buffers():
            buffer.copy_(before[name])
