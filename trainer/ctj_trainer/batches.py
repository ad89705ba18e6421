"""Which samples an optimizer step trains on, and which of them belong to which process. Pure, no torch, no state.

The data is an endless stream of epochs; epoch e is a permutation of the samples seeded by (seed, e). Step s (counted
from 1) takes positions [(s - 1) * G, s * G) of that stream, so a step's samples depend on nothing but (seed, s, G): not
on the number of processes, not on what ran before. A step may span an epoch's end; the global batch is always full.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_ROUNDS = 6  # of the Feistel network; tests/unit/test_data_order.py measures what they do


class BatchError(ValueError):
    """The global batch cannot be laid out over the processes; the message says which values work."""


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The endless order of samples of one job."""

    num_samples: int
    global_batch_size: int
    seed: int

    def of_step(self, step: int) -> Indices:
        """Sample indices of one optimizer step, in stream order."""
        first = (step - 1) * self.global_batch_size
        positions = np.arange(first, first + self.global_batch_size, dtype=np.int64)
        epochs, offsets = np.divmod(positions, self.num_samples)
        samples = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            key = mixed(self.seed, int(epoch))
            samples[here] = permuted(offsets[here], length=self.num_samples, key=key)
        return samples


def micro_batches(samples: Indices, *, rank: int, world_size: int, micro_batch_size: int) -> list[Indices]:
    """Split one step's samples: this rank's micro batches, the same number and sizes on every rank.

    The last micro batch is smaller where the share is not a multiple (after an out-of-memory halving, say).

    Raises:
        BatchError: the global batch is not a multiple of the processes.
    """
    if len(samples) % world_size:
        raise BatchError(
            f"spec.training.globalBatchSize is {len(samples)}; it must be a multiple of the stage's {world_size} "
            f"processes; {len(samples) // world_size * world_size or world_size} and "
            f"{(len(samples) // world_size + 1) * world_size} work"
        )
    share = len(samples) // world_size
    starts = range(0, share, micro_batch_size)
    sizes = [min(micro_batch_size, share - start) for start in starts]
    # Micro batch a of all ranks is one contiguous piece of the stream: its order over ranks is the stream's order.
    return [
        samples[start * world_size + rank * size : start * world_size + (rank + 1) * size]
        for start, size in zip(starts, sizes, strict=True)
    ]


def step_seed(*, seed: int, step: int, rank: int) -> int:
    """Seed of the random generators of one rank in one step, so that no generator state is ever saved."""
    return mixed(mixed(seed, step), rank) >> 1


def mixed(key: int, value: int) -> int:
    """Hash two integers to 64 bits (splitmix64 finaliser)."""
    return int(_hash(np.array([value & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64), key & 0xFFFFFFFFFFFFFFFF)[0])


def permuted(offsets: Indices, *, length: int, key: int) -> Indices:
    """Map each offset below `length` to its place in the permutation `key`, in constant memory.

    A Feistel network over the next even number of bits is a bijection; walking the cycle until the value falls below
    `length` keeps it one. No table of a billion indices per epoch, and a resume needs no replay of a shuffle.
    """
    half = max((int(length - 1).bit_length() + 1) // 2, 1)
    values = _feistel(offsets.astype(np.uint64), half=half, key=key)
    outside = values >= length
    while outside.any():
        values[outside] = _feistel(values[outside], half=half, key=key)
        outside = values >= length
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], *, half: int, key: int) -> NDArray[np.uint64]:
    mask = np.uint64((1 << half) - 1)
    left, right = values >> np.uint64(half), values & mask
    for turn in range(_ROUNDS):
        left, right = right, left ^ (_hash(right, key ^ turn) & mask)
    return (left << np.uint64(half)) | right


def _hash(values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    mixed_in = values + np.uint64((key * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF)
    mixed_in = (mixed_in ^ (mixed_in >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed_in = (mixed_in ^ (mixed_in >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed_in ^ (mixed_in >> np.uint64(31))
