"""Puts the parts together and runs them: wait for the lease, fill the caches, reconcile, stop in order."""

import asyncio
import logging
import os
import signal
import threading
import time
from typing import Any

from ctj_operator.cluster.api_errors import Gone, Unavailable
from ctj_operator.cluster.backend import ClusterBackend
from ctj_operator.cluster.caches import Children, JobCache, key_of
from ctj_operator.cluster.client import JOBS, PODS, TRAINING_JOBS, ApiClient, log_in
from ctj_operator.cluster.events import EventPoster
from ctj_operator.cluster.lease import Leadership, LeaseName
from ctj_operator.cluster.metrics import OperatorMetrics, Sources
from ctj_operator.cluster.probes import ProbeServer
from ctj_operator.cluster.queue import WorkQueue
from ctj_operator.cluster.reflector import Reflector
from ctj_operator.cluster.scrape import ProgressScraper
from ctj_operator.cluster.settings import Settings
from ctj_operator.cluster.shell import watch_jobs
from ctj_operator.cluster.surroundings import Surroundings
from ctj_operator.cluster.workers import Workers
from ctj_operator.core.decision import Decision
from ctj_operator.core.reconcile import reconcile

Document = dict[str, Any]

_FINISH_SECONDS = 20.0
_FLUSH_SECONDS = 2.0
_PATIENCE_SECONDS = 120.0
_PAUSE_SECONDS = 1.0
_STUCK_SECONDS = 300.0  # a pass makes a handful of requests of at most 30 s each

logger = logging.getLogger(__name__)


class CannotStart(Exception):
    """The API server does not let this process begin; the pod is started again."""


class Operator:
    """One process: follower at first, leader once it holds the lease."""

    def __init__(self, settings: Settings):
        self._settings = settings
        self._scopes: tuple[str | None, ...] = settings.namespaces or (None,)
        self._synced = False
        credentials = self._credentials = log_in(settings.kubeconfig)
        self._queue = WorkQueue()
        self._jobs = JobCache()
        self._children = Children(on_change=lambda key: self._queue.add(key, urgent=True))
        self._reflectors: list[Reflector] = []
        self._metrics = OperatorMetrics(
            Sources(jobs=self._jobs.all, queue=self._queue, is_leader=self._is_leading, heard_at=self._heard_at)
        )
        connections = settings.workers + 8
        lease = LeaseName(
            namespace=settings.lease_namespace,
            name=settings.lease_name,
            identity=settings.identity,
            seconds=settings.lease_seconds,
        )
        plain = ApiClient(credentials, connections=2, observe_request=self._metrics.observe_request)
        self._leadership = Leadership(plain, lease, on_lost=_leave)
        self._client = ApiClient(
            credentials,
            connections=connections,
            may_write=self._is_leading,
            observe_request=self._metrics.observe_request,
        )
        self._poster = EventPoster(self._client, instance=settings.identity)
        self._scraper = ProgressScraper(
            every_seconds=settings.scrape_seconds, on_news=lambda key: self._queue.add(key, urgent=True)
        )
        self._backend = ClusterBackend(
            Surroundings(
                client=self._client,
                jobs=self._jobs,
                children=self._children,
                scraper=self._scraper,
                poster=self._poster,
                settings=settings,
                look_later=lambda key, seconds: self._queue.add_later(key, seconds=seconds),
                on_record=self._metrics.count_change,
            )
        )
        self._workers = Workers(
            self._queue, reconcile_key=self._reconcile, metrics=self._metrics, count=settings.workers
        )
        self._probes = ProbeServer(
            port=settings.metrics_port, registry=self._metrics.registry, healthy=self._unhealthy, ready=self._unready
        )

    def run(self) -> int:
        """Run until told to stop; return the process's exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.default_int_handler)  # kopf takes both over once it runs
        self._probes.start()
        logger.info("serving /metrics, /healthz and /readyz on port %s", self._probes.port)
        try:
            self._leadership.acquire()
            self._lead()
        except KeyboardInterrupt:
            logger.info("told to stop before anything was begun")
        finally:
            finished = self._workers.stop(seconds=_FINISH_SECONDS)
            self._poster.stop(seconds=_FLUSH_SECONDS)
            self._leadership.release()
        logger.info("stopped%s", "" if finished else "; some passes did not end in time")
        return 0

    def _lead(self) -> None:
        self._fill_caches()
        self._poster.start()
        self._scraper.start()
        self._workers.start()
        threading.Thread(target=self._resync, name="resync", daemon=True).start()
        asyncio.run(watch_jobs(self._credentials, namespaces=self._settings.namespaces, on_event=self._see))

    def _fill_caches(self) -> None:
        """List everything once before anything is decided; kopf's own listing (460 a second) brings nothing new."""
        started = time.monotonic()
        for scope in self._scopes:
            self._reflectors += [
                Reflector(self._client, JOBS, namespace=scope, cache=self._children.jobs),
                Reflector(self._client, PODS, namespace=scope, cache=self._children.pods),
            ]
        for reflector in self._reflectors:
            reflector.start()
        for reflector in self._reflectors:
            reflector.synced.wait()
        deadline = started + _PATIENCE_SECONDS
        while not self._list_jobs():
            if time.monotonic() > deadline:
                raise CannotStart(f"the jobs could not be listed for {_PATIENCE_SECONDS:.0f} s")
            time.sleep(_PAUSE_SECONDS)
        self._synced = True
        logger.info("caches filled in %.2f s: %s jobs", time.monotonic() - started, len(self._jobs.all()))

    def _list_jobs(self) -> bool:
        """Compare the cache with a listing; False if the server had no time for it (it starts, the kind is new)."""
        try:
            for scope in self._scopes:
                documents, version = self._client.list(TRAINING_JOBS, namespace=scope)
                for document in documents:
                    self._see(None, document)
                uids = [document["metadata"]["uid"] for document in documents]
                for key in self._jobs.keep_only(uids, version=int(version), namespace=scope):
                    self._queue.add(key)
        except (Unavailable, Gone) as error:
            logger.warning("listing jobs: %s", error)
            return False
        return True

    def _see(self, kind: str | None, document: Document) -> None:
        """Take in one object from a listing or a watch; what we wrote ourselves is known already."""
        metadata = document["metadata"]
        key = key_of(metadata["namespace"], metadata["name"])
        if kind == "DELETED":
            self._jobs.remove(document)
            self._queue.add(key)
        elif self._jobs.put(document):
            has_children = document.get("status", {}).get("attempt", 0) > 0
            self._queue.add(key, urgent=has_children and kind is not None)

    def _reconcile(self, key: str) -> Decision | None:
        return reconcile(self._backend, key)

    def _resync(self) -> None:
        """Look at every job now and then, whatever was missed; kopf does not notice a deletion between two watches."""
        while True:
            time.sleep(self._settings.resync_seconds)
            self._list_jobs()
            for document in self._jobs.all():
                self._queue.add(key_of(document["metadata"]["namespace"], document["metadata"]["name"]))

    def _is_leading(self) -> bool:
        return self._leadership.is_held()

    def _heard_at(self) -> dict[str, float]:
        offset = time.time() - time.monotonic()
        heard: dict[str, float] = {}
        for reflector in self._reflectors:
            if reflector.heard_at:  # of several namespaces, the one that was silent longest
                kind, moment = reflector.resource.plural, reflector.heard_at + offset
                heard[kind] = min(moment, heard.get(kind, moment))
        return heard

    def _unhealthy(self) -> str:
        """Not a matter of the API server: its outage must not restart every replica."""
        if not all(reflector.is_alive() for reflector in self._reflectors):
            return "a watch has ended; see the log"
        longest = self._queue.numbers().longest_work_seconds
        return f"a pass has been going on for {longest:.0f} s" if longest > _STUCK_SECONDS else ""

    def _unready(self) -> str:
        return "caches are being filled" if self._is_leading() and not self._synced else ""


def _leave() -> None:
    """Another process may be leading by now: nothing may be finished, flushed or released. The pod is started again."""
    logging.shutdown()
    os._exit(1)
