"""Which key is handed out, when, and to how many workers."""

import threading

import pytest

from ctj_operator.cluster.queue import WorkQueue


class Clock:
    """Time that moves only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> WorkQueue:
    return WorkQueue(clock=clock, jitter=lambda: 1.0)


def take(queue: WorkQueue) -> str:
    taken = queue.get()
    assert taken is not None
    return taken[0]


def take_and_return(queue: WorkQueue) -> str:
    key = take(queue)
    queue.done(key)
    return key


def test_a_key_added_many_times_is_handled_once(queue: WorkQueue) -> None:
    for _ in range(20):
        queue.add("a")
    assert take_and_return(queue) == "a"
    assert queue.numbers().depth == 0


def test_a_key_added_while_it_is_handled_is_handled_once_more(queue: WorkQueue) -> None:
    queue.add("a")
    take(queue)
    queue.add("a")
    queue.add("a")
    assert queue.numbers().depth == 0  # not beside itself
    queue.done("a")
    assert take_and_return(queue) == "a"
    assert queue.numbers().depth == 0


def test_finishing_jobs_do_not_wait_behind_a_burst_of_new_ones(queue: WorkQueue) -> None:
    for number in range(1000):
        queue.add(f"new-{number}")
    queue.add("finishing", urgent=True)
    assert take_and_return(queue) == "finishing"


def test_a_waiting_key_that_becomes_urgent_changes_lanes(queue: WorkQueue) -> None:
    queue.add("a")
    queue.add("b")
    queue.add("b", urgent=True)
    assert [take_and_return(queue), take_and_return(queue)] == ["b", "a"]
    assert queue.numbers().depth == 0


def test_neither_lane_starves(queue: WorkQueue) -> None:
    queue.add("new")
    for number in range(100):
        queue.add(f"busy-{number}", urgent=True)
    assert "new" in [take_and_return(queue) for _ in range(20)]


def test_a_delayed_key_comes_when_it_is_due(queue: WorkQueue, clock: Clock) -> None:
    queue.add_later("later", seconds=10)
    queue.add("now")
    assert take_and_return(queue) == "now"
    assert queue.numbers().depth == 0
    clock.now = 10
    assert take_and_return(queue) == "later"


def test_of_two_plans_for_a_key_the_earlier_holds_and_the_key_comes_once(queue: WorkQueue, clock: Clock) -> None:
    queue.add_later("a", seconds=10)
    queue.add_later("a", seconds=5)
    queue.add_later("a", seconds=20)
    clock.now = 5
    assert take_and_return(queue) == "a"
    clock.now = 100
    queue.add("b")
    assert take_and_return(queue) == "b"
    assert queue.numbers().depth == 0


def test_handling_a_key_drops_what_was_planned_for_it(queue: WorkQueue, clock: Clock) -> None:
    queue.add_later("a", seconds=10)
    queue.add("a")
    take_and_return(queue)
    clock.now = 10
    queue.add("b")
    assert take_and_return(queue) == "b"
    assert queue.numbers().depth == 0


def test_retries_wait_twice_as_long_each_time_up_to_a_limit_and_start_anew_after_success(queue: WorkQueue) -> None:
    waits = [queue.retry("a") for _ in range(13)]
    assert waits[:4] == [0.25, 0.5, 1.0, 2.0]
    assert waits[-1] == 300.0
    queue.forget("a")
    assert queue.retry("a") == 0.25


def test_retries_are_spread_and_respect_what_the_server_asked_for() -> None:
    queue = WorkQueue(jitter=lambda: 0.0)
    assert queue.retry("a") == 0.125
    assert queue.retry("b", at_least_seconds=7.0) == 7.0


def test_closing_sends_waiting_workers_home() -> None:
    queue = WorkQueue()
    got: list[object] = []
    worker = threading.Thread(target=lambda: got.append(queue.get()))
    worker.start()
    queue.close()
    worker.join(5)
    assert got == [None]


def test_several_workers_never_share_a_key_and_lose_none() -> None:
    queue = WorkQueue()
    handled: list[str] = []
    at_work: set[str] = set()
    clashes: list[str] = []
    lock = threading.Lock()

    def work() -> None:
        while (taken := queue.get()) is not None:
            key = taken[0]
            with lock:
                if key in at_work:
                    clashes.append(key)
                at_work.add(key)
            with lock:
                at_work.discard(key)
                handled.append(key)
            queue.done(key)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for round_number in range(50):
        for key in range(20):
            queue.add(str(key), urgent=round_number % 3 == 0)
    while queue.numbers().depth or queue.numbers().working:
        pass
    queue.close()
    for worker in workers:
        worker.join(5)
    assert clashes == []
    assert set(handled) == {str(key) for key in range(20)}
