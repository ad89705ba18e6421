"""C35, huggingface/accelerate#4071: a script resumed in a shuffled epoch sees its tail, or learns that it cannot."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

from ctj_trainer.script_data import InexactResumeError, position, rest_of_epoch

EPOCHS = 3


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()


def loader(*, seedable: bool = True, seed: int = 7, shuffle: bool = True) -> Any:
    """What a started process makes: 12 items in batches of 2."""
    torch.manual_seed(seed)
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable, data_seed=None)
    )
    return accelerator.prepare(DataLoader(torch.arange(12), batch_size=2, shuffle=shuffle))


def batches(one: Any) -> list[list[int]]:
    return [batch.tolist() for batch in one]


def uninterrupted(**changes: Any) -> list[list[list[int]]]:
    one = loader(**changes)
    return [batches(rest_of_epoch(one, position(one, epoch=epoch, batches=0))) for epoch in range(EPOCHS)]


def test_epochs_differ_and_each_has_every_item_once() -> None:
    epochs = uninterrupted()
    assert all(sorted(item for batch in epoch for item in batch) == list(range(12)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_epochs_are_those_of_a_loader_that_nobody_touched() -> None:
    plain = loader()
    assert uninterrupted() == [batches(plain) for _ in range(EPOCHS)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_tail_after_three_batches_of_epoch_one_is_the_uninterrupted_runs(shuffle: bool) -> None:
    whole = uninterrupted(shuffle=shuffle)
    saved = position(loader(shuffle=shuffle), epoch=1, batches=3)
    again = loader(shuffle=shuffle)
    assert batches(rest_of_epoch(again, saved)) == whole[1][3:]
    assert batches(rest_of_epoch(again, position(again, epoch=2, batches=0))) == whole[2]


def test_two_resumes_in_one_epoch_lose_and_repeat_nothing() -> None:
    whole = uninterrupted()
    first = loader()
    seen = batches(rest_of_epoch(first, position(first, epoch=1, batches=0)))[:3]
    second = loader()
    seen += batches(rest_of_epoch(second, position(second, epoch=1, batches=3)))[:2]
    third = loader()
    seen += batches(rest_of_epoch(third, position(third, epoch=1, batches=5)))
    assert seen == whole[1]


def test_an_order_that_cannot_be_repeated_stops_unless_it_is_allowed() -> None:
    one = loader(seedable=False)
    saved = position(one, epoch=1, batches=3)
    with pytest.raises(InexactResumeError, match=r"RandomSampler .*use_seedable_sampler=True"):
        rest_of_epoch(one, saved)
    assert len(batches(rest_of_epoch(one, saved, allow_inexact=True))) == 3


def test_another_seed_than_the_saved_one_stops() -> None:
    saved = position(loader(seed=7), epoch=1, batches=3)
    with pytest.raises(InexactResumeError, match=r"seed is 8, and was 7"):
        rest_of_epoch(loader(seed=8), saved)
