"""kopf as the shell: logs in with our credentials, watches the jobs, ends on signals. Handlers only enqueue.

No finalizer, no annotation, no peering, no posted log lines: kopf writes nothing to the API server.
"""

import random
from collections.abc import Callable
from typing import Any

import kopf

from ctj_api import names
from ctj_operator.cluster.client import Credentials

Document = dict[str, Any]

_FINALIZER = f"{names.GROUP}/never-set"  # kopf removes its own default one from objects that it did not put it on


async def watch_jobs(
    credentials: Credentials,
    *,
    namespaces: tuple[str, ...],
    on_event: Callable[[str | None, Document], None],
) -> None:
    """Run kopf until SIGTERM or SIGINT; `on_event` gets the type (None: listed) and the object.

    Without a stop flag: kopf leaves its waiter behind, and then waits 5 s for it at every stop.
    """
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def log_in(**_: Any) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(
            server=credentials.server,
            ca_path=credentials.ca_file,
            insecure=not credentials.verify,
            certificate_path=credentials.certificate_file,
            private_key_path=credentials.key_file,
            scheme="Bearer",
            token=credentials.token(),
        )

    @kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry)
    async def enqueue(event: Any, **_: Any) -> None:
        on_event(event["type"], dict(event["object"]))

    await kopf.operator(
        registry=registry,
        settings=_build_settings(),
        standalone=True,
        namespaces=namespaces,
        clusterwide=not namespaces,
    )


def _build_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.persistence.finalizer = _FINALIZER
    settings.persistence.diffbase_storage = _NoDiffBase()
    settings.scanning.disabled = True  # else it lists and watches CRDs and namespaces of the whole cluster
    settings.peering.standalone = True
    settings.posting.enabled = False
    settings.networking.error_backoffs = _Backoffs()
    settings.watching.server_timeout = 300
    settings.queueing.exit_timeout = 20
    return settings


class _NoDiffBase(kopf.DiffBaseStorage):
    """kopf copies every object deeply to find changes that nobody here asks for: a fifth of its time per event."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Nothing is ever stored."""


class _Backoffs:
    """About ten minutes of patience with jitter, then kopf ends the process; iterated anew for each request."""

    def __iter__(self) -> Any:
        return (random.uniform(0.5, 1.0) * min(60.0, 2.0**attempt) for attempt in range(16))
