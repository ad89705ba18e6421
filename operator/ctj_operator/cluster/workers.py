"""Takes jobs from the queue and reconciles them, several at a time; decides only when to look at a job again."""

import logging
import threading
import time
from collections.abc import Callable

from ctj_operator.cluster.api_errors import ApiError, LeadershipLost, Unavailable
from ctj_operator.cluster.metrics import OperatorMetrics
from ctj_operator.cluster.queue import WorkQueue
from ctj_operator.core.decision import Decision
from ctj_operator.core.reconcile import Conflict

logger = logging.getLogger(__name__)


class Workers:
    """Threads that call `reconcile_key`; the queue keeps each key to one of them at a time."""

    def __init__(
        self,
        queue: WorkQueue,
        *,
        reconcile_key: Callable[[str], Decision | None],
        metrics: OperatorMetrics,
        count: int,
    ):
        self._queue = queue
        self._reconcile_key = reconcile_key
        self._metrics = metrics
        self._threads = [
            threading.Thread(target=self._run, name=f"reconcile-{number}", daemon=True) for number in range(count)
        ]

    def start(self) -> None:
        """Begin to take keys."""
        for thread in self._threads:
            thread.start()

    def stop(self, *, seconds: float) -> bool:
        """Let current passes end, start none; say whether all ended within `seconds`."""
        self._queue.close()
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (taken := self._queue.get()) is not None:
            key, waited = taken
            self._metrics.queue_seconds.observe(waited)
            started = time.monotonic()
            try:
                result = self._pass_over(key)
            finally:
                self._queue.done(key)
            self._metrics.reconciles.labels(result).inc()
            self._metrics.reconcile_seconds.observe(time.monotonic() - started)

    def _pass_over(self, key: str) -> str:
        """Reconcile once and plan the next look; return what became of it, for metrics."""
        try:
            decision = self._reconcile_key(key)
        except Conflict as conflict:
            logger.debug("%s: %s", key, conflict)
            self._retry(key)
            return "conflict"
        except LeadershipLost:
            return "not_leading"
        except Unavailable as error:
            wait = self._retry(key, at_least_seconds=error.retry_after)
            logger.warning("%s: %s; again in %.1f s", key, error, wait)
            return "error"
        except (ApiError, ValueError) as error:
            wait = self._retry(key)
            logger.warning("%s: %s; again in %.1f s", key, error, wait)
            return "error"
        except Exception:
            # A bug met by one job must not end the worker for all others; it is logged whole and counted.
            logger.exception("%s: again in %.1f s", key, self._retry(key))
            return "error"
        self._queue.forget(key)
        if decision is not None and decision.requeue_after is not None:
            self._queue.add_later(key, seconds=decision.requeue_after)
        return "success"

    def _retry(self, key: str, *, at_least_seconds: float = 0.0) -> float:
        self._metrics.retries.inc()
        return self._queue.retry(key, at_least_seconds=at_least_seconds)
