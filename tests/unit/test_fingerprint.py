"""Ranks that are not equal are refused in one line, with every difference. No torch."""

import pytest

from ctj_trainer.compile.errors import RanksDifferError
from ctj_trainer.compile.fingerprint import refuse_differences

OURS = {"torch": "2.15.0", "device": "NVIDIA H100 (sm_90)", "policy": "0a1b", "threads": "4", "tf32": "matmul False"}


def test_equal_ranks_pass() -> None:
    refuse_differences([OURS, dict(OURS), dict(OURS)])


def test_a_difference_names_field_rank_both_values_and_the_remedy() -> None:
    with pytest.raises(RanksDifferError) as refused:
        refuse_differences([OURS, OURS, OURS | {"torch": "2.14.1"}])
    assert "\n" not in str(refused.value)
    assert "torch is 2.14.1 on rank 2 and 2.15.0 on rank 0; use one image for all pods" in str(refused.value)


def test_every_difference_is_said_at_once() -> None:
    slower = OURS | {"threads": "8", "tf32": "matmul True"}
    with pytest.raises(RanksDifferError) as refused:
        refuse_differences([OURS, slower, slower])
    text = str(refused.value)
    assert "threads is 8 on rank 1 (and 1 more ranks differ) and 4 on rank 0; set OMP_NUM_THREADS" in text
    assert "tf32 is matmul True on rank 1" in text
    assert "policy" not in text
