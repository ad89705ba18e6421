"""Where do the workers hang, told from the two kinds of stack dumps."""

import pytest

from ctj_trainer.supervisor.stacks import where

PY_SPY = """Process 71: python -u -m ctj_trainer.supervisor.child
Python v3.11.7 (/usr/bin/python3.11)

Thread 80 (idle): "progress-heartbeat"
    wait (threading.py:331)
    _beat (ctj_trainer/progress.py:77)
Thread 71 (active): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2810)
    step (ctj_trainer/loop.py:93)
"""
FAULT_HANDLER = """Thread 0x00007f11 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f22 (most recent call first):
  File "/x/fake_worker.py", line 92 in do_hang_here
  File "/x/fake_worker.py", line 32 in main
"""


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (PY_SPY, "all_reduce (torch/distributed/distributed_c10d.py:2810)"),
        (FAULT_HANDLER, 'File "/x/fake_worker.py", line 92 in do_hang_here'),
        ("", "an unknown place"),
    ],
)
def test_the_main_thread_is_the_one_that_matters(text: str, place: str) -> None:
    assert where({1: text}) == f"rank 1 at {place}"


def test_every_rank_is_told() -> None:
    assert where({1: "", 0: FAULT_HANDLER}).startswith("rank 0 at File")
