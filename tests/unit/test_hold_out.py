"""What is evaluated on is never trained on."""

from typing import Any

import pytest
import torch

from ctj_api.spec import Evaluation
from ctj_trainer.evaluation import hold_out
from ctj_trainer.recipe import DataError, Recipe

NUMBERS = [{"x": torch.tensor(i)} for i in range(40)]


def recipe(**changes: Any) -> Recipe:
    facts: dict[str, Any] = {"build_model": torch.nn.Identity, "samples": NUMBERS, "loss": lambda _model, _batch: None}
    return Recipe(**(facts | changes))


def evaluation(share: str) -> Evaluation:
    return Evaluation(every_steps=1, share=share)


def numbers(samples: Any) -> list[int]:
    return [int(samples[index]["x"]) for index in range(len(samples))]


@pytest.mark.parametrize(("share", "held"), [("0.05", 2), ("0.5", 20), ("0.001", 1)])
def test_the_last_share_is_held_out(share: str, held: int) -> None:
    parted = hold_out(recipe(), evaluation(share))
    assert numbers(parted.samples) == list(range(40 - held))
    assert numbers(parted.evaluation) == list(range(40 - held, 40))


def test_samples_that_the_recipe_brings_are_used_and_nothing_is_held_out() -> None:
    own = recipe(evaluation=NUMBERS[:3])
    assert hold_out(own, evaluation("0.5")) is own


def test_without_an_evaluation_nothing_is_held_out() -> None:
    whole = recipe()
    assert hold_out(whole, None) is whole


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(DataError, match="holds out 1 of 1 samples"):
        hold_out(recipe(samples=NUMBERS[:1]), evaluation("0.05"))
