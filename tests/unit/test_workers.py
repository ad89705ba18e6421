"""When is a job looked at again, whatever a pass over it came to?"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from ctj_api.status import Status
from ctj_operator.cluster.api_errors import LeadershipLost, Refused, Unavailable
from ctj_operator.cluster.metrics import OperatorMetrics, Sources
from ctj_operator.cluster.queue import WorkQueue
from ctj_operator.cluster.workers import Workers
from ctj_operator.core.decision import Decision
from ctj_operator.core.reconcile import Conflict


@contextmanager
def working(reconcile_key: Callable[[str], Decision | None]) -> Iterator[tuple[WorkQueue, Workers, OperatorMetrics]]:
    queue = WorkQueue()
    sources = Sources(jobs=list, queue=queue, is_leader=lambda: True, heard_at=dict)
    metrics = OperatorMetrics(sources)
    workers = Workers(queue, reconcile_key=reconcile_key, metrics=metrics, count=2)
    workers.start()
    try:
        yield queue, workers, metrics
    finally:
        assert workers.stop(seconds=5)


def passes(metrics: OperatorMetrics, result: str) -> float:
    return metrics.registry.get_sample_value("ctj_reconcile_total", {"result": result}) or 0.0


def wait_for(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("problem", "result"),
    [
        (Conflict("changed"), "conflict"),
        (Unavailable("busy"), "error"),
        (Refused("no"), "error"),
        (ZeroDivisionError("a bug"), "error"),
    ],
)
def test_a_pass_that_fails_is_tried_again_and_then_rests(problem: Exception, result: str) -> None:
    calls = []

    def reconcile_key(key: str) -> Decision | None:
        calls.append(key)
        if len(calls) == 1:
            raise problem
        return None

    with working(reconcile_key) as (queue, _, metrics):
        queue.add("a")
        wait_for(lambda: passes(metrics, "success") == 1)
        time.sleep(0.1)
        assert (calls, passes(metrics, result)) == (["a", "a"], 1)


def test_a_bug_met_by_one_job_does_not_stop_the_others() -> None:
    def reconcile_key(key: str) -> Decision | None:
        if key == "bad":
            raise ZeroDivisionError
        return None

    with working(reconcile_key) as (queue, _, metrics):
        for _ in range(3):
            queue.add("bad")
        for number in range(20):
            queue.add(str(number))
        wait_for(lambda: passes(metrics, "success") == 20)


def test_a_decision_says_when_to_look_again() -> None:
    calls = []

    def reconcile_key(key: str) -> Decision | None:
        calls.append(key)
        return Decision(status=Status(), requeue_after=0.01 if len(calls) < 3 else None)

    with working(reconcile_key) as (queue, _, metrics):
        queue.add("a")
        wait_for(lambda: passes(metrics, "success") == 3)
        time.sleep(0.1)
        assert len(calls) == 3


def test_without_leadership_nothing_is_retried() -> None:
    def reconcile_key(key: str) -> Decision | None:
        raise LeadershipLost(key)

    with working(reconcile_key) as (queue, _, metrics):
        queue.add("a")
        wait_for(lambda: passes(metrics, "not_leading") == 1)
        assert queue.numbers().delayed == 0


def test_stopping_lets_the_current_pass_end_and_starts_none() -> None:
    begun, go_on = threading.Event(), threading.Event()
    ended = []

    def reconcile_key(key: str) -> Decision | None:
        begun.set()
        go_on.wait(5)
        ended.append(key)
        return None

    with working(reconcile_key) as (queue, workers, _):
        queue.add("a")
        begun.wait(5)
        stopping = threading.Thread(target=workers.stop, kwargs={"seconds": 5})
        stopping.start()
        queue.add("b")
        go_on.set()
        stopping.join(5)
    assert ended == ["a"]
