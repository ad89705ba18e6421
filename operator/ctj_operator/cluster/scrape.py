"""How far is a running attempt? Asks its first pod now and then, off the reconcile path; nothing waits for it."""

import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import urllib3
from pydantic import ValidationError

from ctj_api.report import Progress

_TIMEOUT_SECONDS = 1.0
_FIRST_SECONDS = 5.0  # until the first answer: a pod that just started is not serving yet
_TICK_SECONDS = 0.5
_THREADS = 4
_MAX_BYTES = 65_536

logger = logging.getLogger(__name__)


@dataclass
class _Target:
    child_uid: str
    url: str
    due: float
    is_asked: bool = False
    """Its last question is not over: else targets that never answer would pile up questions without end."""
    progress: Progress | None = None


class ProgressScraper:
    """One target per job: its running attempt."""

    def __init__(self, *, every_seconds: float, on_news: Callable[[str], None]):
        self._every_seconds = every_seconds
        self._on_news = on_news
        self._targets: dict[str, _Target] = {}
        self._lock = threading.Lock()
        self._http = urllib3.PoolManager(num_pools=64, maxsize=_THREADS, retries=False, timeout=_TIMEOUT_SECONDS)

    def start(self) -> None:
        """Scrape in daemon threads until the process ends."""
        threading.Thread(target=self._run, name="scrape", daemon=True).start()

    def follow(self, key: str, *, child_uid: str, address: str) -> None:
        """Ask `address` (host:port) from now on; anything earlier of this job is forgotten."""
        url = f"http://{address}/progress"
        with self._lock:
            target = self._targets.get(key)
            if target is None or (target.child_uid, target.url) != (child_uid, url):
                self._targets[key] = _Target(child_uid=child_uid, url=url, due=time.monotonic())

    def forget(self, key: str) -> None:
        """Nothing of this job runs."""
        with self._lock:
            self._targets.pop(key, None)

    def latest(self, key: str, *, child_uid: str) -> Progress | None:
        """Return the newest answer of this very child."""
        with self._lock:
            target = self._targets.get(key)
            return target.progress if target and target.child_uid == child_uid else None

    def _run(self) -> None:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="scrape") as pool:
            while True:
                for key, target in self._take_due():
                    pool.submit(self._ask_once, key, target)
                time.sleep(_TICK_SECONDS)

    def _take_due(self) -> list[tuple[str, _Target]]:
        now = time.monotonic()
        with self._lock:
            due = [(key, target) for key, target in self._targets.items() if target.due <= now and not target.is_asked]
            for _, target in due:
                target.is_asked = True
                target.due = now + (
                    self._every_seconds if target.progress else min(_FIRST_SECONDS, self._every_seconds)
                )
        return due

    def _ask_once(self, key: str, target: _Target) -> None:
        try:
            self._ask(key, target)
        finally:
            target.is_asked = False

    def _ask(self, key: str, target: _Target) -> None:
        try:
            response = self._http.request("GET", target.url, preload_content=False)
            progress = Progress.from_document(json.loads(response.read(_MAX_BYTES)))
            response.release_conn()
        except (urllib3.exceptions.HTTPError, ValueError, ValidationError) as error:
            logger.debug("%s: no progress from %s: %s", key, target.url, error)
            return
        is_news = (
            target.progress is None or progress.step != target.progress.step or progress.phase != target.progress.phase
        )
        with self._lock:
            target.progress = progress
        if is_news:
            self._on_news(key)
