"""One pass over one job: observe, decide, record, apply. The same for Kubernetes and for local processes.

Record, then act: the compare-and-swap on the status is the fence against a second runner or a stale cache. Whatever is
lost after it is found missing by the next pass and done again.
"""

import time
from collections.abc import Callable
from typing import Protocol

from ctj_operator.core.decide import decide
from ctj_operator.core.decision import Decision
from ctj_operator.core.observed import Observed


class Conflict(Exception):
    """The stored object is newer than the one observed; look again."""


class Backend(Protocol):
    """Where jobs and their children live."""

    def observe(self, key: str) -> Observed | None:
        """Return what is known of job `key`, or None when it is gone."""

    def record(self, observed: Observed, decision: Decision) -> None:
        """Store the decided status over the observed one.

        Raises:
            Conflict: somebody else wrote in between; nothing was stored.
        """

    def apply(self, observed: Observed, decision: Decision) -> None:
        """Delete, create, steer children and post events; repeatable."""


def reconcile(backend: Backend, key: str, *, now: Callable[[], float] = time.time) -> Decision | None:
    """Bring job `key` one step further; None when the job is gone.

    Raises:
        Conflict: nothing was done; try again with a fresh observation.
    """
    observed = backend.observe(key)
    if observed is None:
        return None
    decision = decide(observed, now=now())
    if decision.status != observed.status:
        backend.record(observed, decision)
    backend.apply(observed, decision)
    return decision
