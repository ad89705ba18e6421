"""The factor on an fp16 loss: halved by an overflow, doubled by patience, and a divergence only at its floor."""

import math

import pytest

from ctj_api.spec import Training
from ctj_trainer.loss_scale import FLOOR, GROWTH_STEPS, INITIAL, LossScale, LossScaleState


def scale_of(precision: str, *, averaged_over: int = 1) -> LossScale | None:
    document = {"steps": 1, "globalBatchSize": 1, "microBatchSize": 1, "precision": precision}
    return LossScale.of(Training.from_document(document), averaged_over=averaged_over)


def fp16(*, averaged_over: int = 1) -> LossScale:
    scale = scale_of("fp16", averaged_over=averaged_over)
    assert scale is not None
    return scale


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_only_fp16_has_one(precision: str) -> None:
    assert scale_of(precision) is None


@pytest.mark.parametrize("norm", [math.inf, -math.inf, math.nan])
def test_an_overflow_halves_it_and_is_a_skipped_step(norm: float) -> None:
    scale = fp16()
    scale.learn(norm)
    assert scale.skipped
    assert scale.state == LossScaleState(scale=INITIAL / 2, good_steps=0)
    scale.learn(1.0)
    assert not scale.skipped
    assert scale.state == LossScaleState(scale=INITIAL / 2, good_steps=1)


def test_patience_doubles_it_and_an_overflow_starts_the_count_anew() -> None:
    scale = fp16()
    for _ in range(GROWTH_STEPS - 1):
        scale.learn(1.0)
    assert scale.state.scale == INITIAL
    scale.learn(1.0)
    assert scale.state == LossScaleState(scale=2 * INITIAL, good_steps=0)
    scale.learn(1.0)
    scale.learn(math.inf)
    assert scale.state == LossScaleState(scale=INITIAL, good_steps=0)


def test_at_the_floor_an_overflow_is_no_skipped_step_any_more() -> None:
    scale = fp16()
    skipped = []
    while not skipped or skipped[-1]:
        scale.learn(math.inf)
        skipped.append(scale.skipped)
    assert skipped == [True] * 16 + [False]
    assert scale.state.scale == FLOOR


def test_a_backward_meets_the_same_factor_whatever_the_number_of_processes() -> None:
    for processes in (1, 2, 8):
        assert processes * fp16(averaged_over=processes).factor == INITIAL
