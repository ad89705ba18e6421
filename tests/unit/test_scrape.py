"""How progress of running attempts is asked for, and what is made of strange answers."""

import time
from collections.abc import Callable

from tests.unit.api_stand_in import Answer, api

from ctj_operator.cluster.scrape import ProgressScraper

PROGRESS = {"attempt": 1, "step": 7, "phase": "Training", "mode": "Eager", "updatedAt": 1.0}


def wait_for(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_news_are_told_once_and_belong_to_the_child_that_was_asked() -> None:
    news: list[str] = []
    with api(*[Answer(body=PROGRESS)] * 3) as pod:
        scraper = ProgressScraper(every_seconds=0.1, on_news=news.append)
        scraper.follow("a/b", child_uid="one", address=pod.url.removeprefix("http://"))
        scraper.start()
        wait_for(lambda: len(pod.requests) == 3)
    assert pod.requests[0].path == "/progress"
    seen = scraper.latest("a/b", child_uid="one")
    assert seen is not None
    assert seen.step == 7
    assert scraper.latest("a/b", child_uid="another") is None
    assert news == ["a/b"]  # twice the same is no news
    scraper.forget("a/b")
    assert scraper.latest("a/b", child_uid="one") is None


def test_an_attempt_that_does_not_answer_or_talks_nonsense_has_no_progress() -> None:
    nonsense = [Answer(body={"step": "seven"}), Answer(status=503, body={}), Answer(body=PROGRESS)]
    with api(*nonsense) as pod:
        scraper = ProgressScraper(every_seconds=0.1, on_news=lambda _: None)
        scraper.follow("a/b", child_uid="one", address=pod.url.removeprefix("http://"))
        scraper.follow("a/nobody", child_uid="two", address="127.0.0.1:9")
        scraper.start()
        wait_for(lambda: scraper.latest("a/b", child_uid="one") is not None)
        scraper.forget("a/b")
    assert scraper.latest("a/nobody", child_uid="two") is None


def test_a_new_attempt_takes_the_place_of_the_one_before() -> None:
    scraper = ProgressScraper(every_seconds=30, on_news=lambda _: None)
    with api(Answer(body=PROGRESS)) as pod:
        address = pod.url.removeprefix("http://")
        scraper.follow("a/b", child_uid="one", address=address)
        scraper.start()
        wait_for(lambda: scraper.latest("a/b", child_uid="one") is not None)
    scraper.follow("a/b", child_uid="two", address=address)
    assert scraper.latest("a/b", child_uid="one") is None
    scraper.forget("a/b")


def test_a_pod_that_answers_late_is_not_asked_twice_at_once() -> None:
    scraper = ProgressScraper(every_seconds=0.0, on_news=lambda _: None)
    scraper.follow("a/b", child_uid="one", address="127.0.0.1:9")
    [(key, target)] = scraper._take_due()
    assert scraper._take_due() == []
    scraper._ask_once(key, target)
    assert scraper._take_due() == [(key, target)]
