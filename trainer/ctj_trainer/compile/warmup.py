"""Every rank compiles before the first step, on the shapes to come, and waits for the others outside of any collective.

A rank with a cold cache may need minutes more than its peers. In a gradient's all-reduce they would time out and blame
the network; here the wait has its own limit, and its error names the rank.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ctj_api.exit_codes import ExitCode
from ctj_api.report import MemoryPrediction
from ctj_trainer import progress
from ctj_trainer.compile.cache import CompileCache
from ctj_trainer.compile.policy import CompileConfigError, CompilePolicy
from ctj_trainer.compile.session import CompileSession
from ctj_trainer.loop import Loop
from ctj_trainer.outcome import Outcome
from ctj_trainer.ranks import Ranks
from ctj_trainer.scene import Scene

log = logging.getLogger("ctj")

Rehearsal = Callable[[Mapping[str, Tensor]], None]
"""Forward and backward of one batch, without an update."""


def warm_up_ranks(scene: Scene, loop: Loop, policy: CompilePolicy, memory: Sequence[MemoryPrediction]) -> None:
    """Compile on every rank for the first batch and the declared shapes, then wait for the last rank. Collective.

    What was compiled is published at once: the next attempt may follow a crash.

    Raises:
        LateRankError: a rank did not come in time.
    """
    gradients, session = loop.parts.gradients, loop.parts.session
    scene.telemetry.phase(progress.COMPILING)
    first = gradients.batches_of(loop.step + 1)[0]
    batches = [first, *(shaped(first, sizes) for sizes in policy.shapes)]
    cache = CompileCache(policy, rank=scene.ranks.rank)

    def run() -> None:
        warm_up(gradients.rehearse, batches, inner=loop.parts.prepared.inner, ranks=scene.ranks)
        scene.ranks.board.meet(timeout_seconds=policy.timeout_seconds)  # before anything collective

    with session.warming() as guard:
        cache.mended(run, guard=guard, ranks=scene.ranks, notice=scene.notice)
    log.info("warmed up on %d shapes in %.1f s", len(batches), session.warm_seconds)
    if scene.ranks.rank == 0:
        _publish(scene, session, cache, memory)


def _publish(scene: Scene, session: CompileSession, cache: CompileCache, memory: Sequence[MemoryPrediction]) -> None:
    attempt = scene.attempt
    try:
        is_new = session.facts.cache_misses > 0
        session.archive = cache.publish(scene.root, before=attempt.compile_cache, compiled=is_new)
    except OSError as error:
        scene.notice(f"compiled code could not be published ({error.strerror}): another node compiles it again")
    if session.archive is not None:
        early = Outcome(
            attempt=attempt,
            exit_code=ExitCode.USER_CODE_OR_IMAGE,
            measurements={},
            memory=memory,
            notices=scene.notices,
            compile_cache=session.archive,
        )
        early.write(scene.run_dir)


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
