"""Which sample trains when: the same for every split over processes, every sample once per epoch, resume included."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctj_trainer.batches import BatchError, SampleOrder, micro_batches, permuted, step_seed

SEEDS = st.integers(0, 2**31 - 1)


@settings(deadline=None)
@given(length=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 50))
def test_an_epoch_is_a_permutation(length: int, seed: int, epoch: int) -> None:
    order = SampleOrder(num_samples=length, global_batch_size=length, seed=seed)
    assert sorted(order.of_step(epoch + 1)) == list(range(length))


@settings(deadline=None, max_examples=30)
@given(samples=st.integers(1, 200), batch=st.integers(8, 256), seed=SEEDS)
def test_every_sample_comes_once_per_epoch_though_steps_span_its_end(samples: int, batch: int, seed: int) -> None:
    order = SampleOrder(num_samples=samples, global_batch_size=batch, seed=seed)
    steps = -(-3 * samples // batch)
    stream = np.concatenate([order.of_step(step) for step in range(1, steps + 1)])
    for epoch in range(3):
        assert sorted(stream[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


@settings(deadline=None)
@given(
    share=st.integers(1, 24),
    world_size=st.integers(1, 8),
    micro_batch_size=st.integers(1, 32),
    step=st.integers(1, 10**9),
    seed=SEEDS,
)
def test_a_step_trains_the_same_samples_however_it_is_split(
    share: int, world_size: int, micro_batch_size: int, step: int, seed: int
) -> None:
    samples = SampleOrder(num_samples=1000, global_batch_size=share * world_size, seed=seed).of_step(step)
    shares = [
        micro_batches(samples, rank=rank, world_size=world_size, micro_batch_size=micro_batch_size)
        for rank in range(world_size)
    ]
    assert len({tuple(len(piece) for piece in pieces) for pieces in shares}) == 1  # ranks stay in step
    assert all(1 <= len(piece) <= micro_batch_size for pieces in shares for piece in pieces)
    in_order = np.concatenate([piece for turn in zip(*shares, strict=True) for piece in turn])
    assert in_order.tolist() == samples.tolist()


@settings(deadline=None, max_examples=30)
@given(resume_after=st.integers(0, 12), seed=SEEDS)
def test_a_resumed_run_sees_the_tail_of_the_uninterrupted_one(resume_after: int, seed: int) -> None:
    """C35, huggingface/accelerate#4071: 12 items, batches of 2; a resume in epoch 1 replayed the order of epoch 0."""
    uninterrupted = [SampleOrder(num_samples=12, global_batch_size=2, seed=seed).of_step(s) for s in range(1, 13)]
    resumed = SampleOrder(num_samples=12, global_batch_size=2, seed=seed)
    tail = [resumed.of_step(step) for step in range(resume_after + 1, 13)]
    assert np.array_equal(tail, uninterrupted[resume_after:])
    assert sorted(np.concatenate(uninterrupted[6:])) == list(range(12))


def test_two_resumes_in_one_epoch_repeat_and_lose_nothing() -> None:
    seen: list[int] = []
    for steps in (range(1, 4), range(4, 6), range(6, 7)):  # each range a new process
        order = SampleOrder(num_samples=12, global_batch_size=2, seed=3)
        seen += [int(sample) for step in steps for sample in order.of_step(step)]
    assert sorted(seen) == list(range(12))


def test_epochs_and_seeds_differ() -> None:
    orders = {
        tuple(SampleOrder(num_samples=50, global_batch_size=50, seed=seed).of_step(step))
        for seed in range(5)
        for step in range(1, 6)
    }
    assert len(orders) == 25


def test_positions_and_neighbours_look_random() -> None:
    """Chi-square of where a sample lands, and of the distance between neighbours, over 1,000 epochs."""
    length, epochs = 10, 1000
    landed, distance = np.zeros((length, length)), np.zeros(length)
    for epoch in range(epochs):
        order = permuted(np.arange(length), length=length, key=step_seed(seed=1, step=epoch, rank=0))
        landed[np.arange(length), order] += 1
        distance[(order[1] - order[0]) % length] += 1
    expected = epochs / length
    assert ((landed - expected) ** 2 / expected).sum() < 150  # 81 degrees of freedom: p > 1e-5
    assert ((distance[1:] - epochs / 9) ** 2 / (epochs / 9)).sum() < 35  # 8 degrees of freedom


def test_a_batch_of_a_billion_samples_costs_no_table() -> None:
    order = SampleOrder(num_samples=10**9 + 7, global_batch_size=512, seed=0)
    samples = order.of_step(10**6)
    assert len(set(samples.tolist())) == 512
    assert samples.max() < 10**9 + 7


def test_a_batch_that_does_not_divide_says_what_works() -> None:
    samples = SampleOrder(num_samples=100, global_batch_size=10, seed=0).of_step(1)
    with pytest.raises(
        BatchError, match="globalBatchSize is 10; it must be a multiple of the stage's 4 processes; 8 and 12 work"
    ):
        micro_batches(samples, rank=0, world_size=4, micro_batch_size=1)


def test_step_seeds_differ_by_seed_step_and_rank() -> None:
    seeds = {step_seed(seed=a, step=b, rank=c) for a in range(8) for b in range(1, 9) for c in range(8)}
    assert len(seeds) == 512
    assert all(0 <= seed < 2**63 for seed in seeds)
