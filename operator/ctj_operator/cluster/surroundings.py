"""What reconciling works with, put together once in `operator.py`: client, caches and the threads beside it."""

from collections.abc import Callable
from dataclasses import dataclass

from ctj_api.attempt import JobIdentity
from ctj_api.status import Status
from ctj_operator.cluster.api_errors import NotFound
from ctj_operator.cluster.caches import Children, JobCache, split_key
from ctj_operator.cluster.client import TRAINING_JOBS, ApiClient
from ctj_operator.cluster.events import EventPoster
from ctj_operator.cluster.scrape import ProgressScraper
from ctj_operator.cluster.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Everything thread-safe."""

    client: ApiClient
    jobs: JobCache
    children: Children
    scraper: ProgressScraper
    poster: EventPoster
    settings: Settings
    look_later: Callable[[str, float], None]
    """Have a key looked at again after so many seconds."""
    on_record: Callable[[JobIdentity, Status, Status], None]
    """Told of every stored change of a status: identity, before, after."""

    def refresh(self, key: str) -> None:
        """Read one job live: the watch is behind what the server has."""
        namespace, name = split_key(key)
        known = self.jobs.get(key)
        try:
            self.jobs.put(self.client.get(TRAINING_JOBS, namespace=namespace, name=name))
        except NotFound:
            if known:
                self.jobs.remove(known)
