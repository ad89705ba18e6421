"""The local side of reconcile: observe a folder and its processes, record in the folder, apply to the processes."""

import time
from collections.abc import Callable

from ctj_operator.core.decision import Decision, Event
from ctj_operator.core.observed import Observed
from ctj_operator.local.processes import Processes
from ctj_operator.local.store import Store


class LocalBackend:
    """One job's folder as a `core.reconcile.Backend`."""

    def __init__(self, store: Store, processes: Processes, *, announce: Callable[[Event], None]) -> None:
        self._store = store
        self._processes = processes
        self._announce = announce
        self.stop_requested = False
        """Ctrl-C: this run sees the job as suspended: a checkpoint is saved, nothing is counted. The stored spec is
        not touched, so the next run goes on."""

    def observe(self, key: str) -> Observed:
        """Read the folder and look at the processes; `key` is the folder's only job."""
        job = self._store.read_job()
        assert job.identity.name == key
        stored = self._store.read_status()
        spec = {**job.spec, "suspend": True} if self.stop_requested else job.spec
        return Observed(
            job=job.identity,
            generation=job.generation,
            resource_version=str(stored.version),
            spec=spec,
            status=stored.status,
            annotations=job.annotations,
            children=self._processes.observe(),
        )

    def record(self, observed: Observed, decision: Decision) -> None:
        """Store the status over the one observed."""
        self._store.write_status(decision.status, over=int(observed.resource_version))

    def apply(self, _observed: Observed, decision: Decision) -> None:
        """Act on the children and tell people. `delete_job` is ignored: nothing of a user's is deleted here."""
        for uid in decision.delete:
            self._processes.delete(uid)
        if decision.create is not None:
            self._processes.start(decision.create)
        if decision.control is not None:
            self._processes.steer(decision.control)
        now = time.time()
        self._processes.tend(now=now)
        for event in decision.events:
            self._store.append_event(event, at=now)
            self._announce(event)
