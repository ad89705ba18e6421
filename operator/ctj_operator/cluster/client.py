"""How requests reach the API server: login, plain JSON documents in and out, errors translated once.

The one module that knows the Kubernetes client library, and only its login: the model layer of version 37 costs more
time per object than everything else here, and refuses objects of newer servers.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import kubernetes.client
import kubernetes.config
import urllib3

from ctj_api import names
from ctj_operator.cluster.api_errors import ApiError, LeadershipLost, Unavailable, translate

Document = dict[str, Any]

_config: Any = kubernetes.config  # untyped

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 30.0
_TOKEN_SECONDS = 60.0  # service account tokens live an hour and are replaced on disk long before
_WATCH_SECONDS = 300  # the server ends a watch after this long
_SILENCE_SECONDS = 75.0  # bookmarks come every minute or so; a longer silence is a dead peer
_PAGE = 500


@dataclass(frozen=True)
class Resource:
    """Where objects of one kind live in the API."""

    api_version: str
    plural: str

    def path(self, *, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """Path of a collection, an object or its subresource; no namespace means the whole cluster."""
        parts = ["/api" if "/" not in self.api_version else "/apis", self.api_version]
        if namespace:
            parts += ["namespaces", namespace]
        return "/".join([*parts, self.plural, *(part for part in (name, subresource) if part)])


TRAINING_JOBS = Resource(names.API_VERSION, names.PLURAL)
JOBS = Resource("batch/v1", "jobs")
PODS = Resource("v1", "pods")
SERVICES = Resource("v1", "services")
EVENTS = Resource("v1", "events")
LEASES = Resource("coordination.k8s.io/v1", "leases")


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """What any client needs to log in; `token` is asked again now and then, since it is replaced while we run."""

    server: str
    ca_file: str | None
    certificate_file: str | None
    key_file: str | None
    verify: bool
    token: Callable[[], str | None]


class CannotLogIn(ValueError):
    """There is no usable login; the message says what was tried."""


def log_in(kubeconfig: str | None = None) -> Credentials:
    """Use the named file, else the pod's service account, else kubectl's configuration.

    Raises:
        CannotLogIn: none of them is there.
    """
    configuration = kubernetes.client.Configuration()
    try:
        _load(configuration, kubeconfig)
    except (_config.ConfigException, OSError) as error:
        tried = f"--kubeconfig {kubeconfig}" if kubeconfig else "a service account, KUBECONFIG and ~/.kube/config"
        raise CannotLogIn(f"no login for an API server: tried {tried}: {error}") from error

    def token() -> str | None:
        header = configuration.get_api_key_with_prefix("BearerToken")
        header = header or configuration.get_api_key_with_prefix("authorization")
        return header.removeprefix("Bearer ") if header else None

    return Credentials(
        server=configuration.host.rstrip("/"),
        ca_file=configuration.ssl_ca_cert,
        certificate_file=configuration.cert_file,
        key_file=configuration.key_file,
        verify=configuration.verify_ssl,
        token=token,
    )


@dataclass(frozen=True, kw_only=True)
class _Request:
    method: str
    verb: str
    """The API's word for it, as in RBAC and metrics."""
    resource: Resource
    path: str
    query: Document | None = None
    body: Document | None = None
    content_type: str = "application/json"

    @property
    def url(self) -> str:
        return self.path + (f"?{urlencode(self.query)}" if self.query else "")


def _load(configuration: kubernetes.client.Configuration, kubeconfig: str | None) -> None:
    if kubeconfig:
        _config.load_kube_config(kubeconfig, client_configuration=configuration)
        return
    try:
        _config.load_incluster_config(client_configuration=configuration)
    except _config.ConfigException:
        _config.load_kube_config(client_configuration=configuration)


RequestObserver = Callable[[str, str, int, float], None]
"""Called after each request with verb, plural, HTTP status (0: no answer) and seconds."""


class ApiClient:
    """Thread-safe; one connection pool for the process. Every method may raise `ApiError`."""

    def __init__(
        self,
        credentials: Credentials,
        *,
        connections: int = 16,
        may_write: Callable[[], bool] = lambda: True,
        observe_request: RequestObserver = lambda *_: None,
    ):
        self._credentials = credentials
        self._may_write = may_write
        self._observe_request = observe_request
        self._token: tuple[float, str | None] = (0.0, None)
        self._pool = urllib3.PoolManager(
            maxsize=connections,
            retries=False,
            ca_certs=credentials.ca_file,
            cert_file=credentials.certificate_file,
            key_file=credentials.key_file,
            cert_reqs="CERT_REQUIRED" if credentials.verify else "CERT_NONE",
        )

    def get(self, resource: Resource, *, namespace: str, name: str) -> Document:
        """Read one object as it is now."""
        path = resource.path(namespace=namespace, name=name)
        return self._send(_Request(method="GET", verb="get", resource=resource, path=path))

    def create(self, resource: Resource, document: Document) -> Document:
        """Create; the answer carries uid and version.

        Raises:
            AlreadyExists: the name is taken, perhaps by an earlier try of ours.
        """
        path = resource.path(namespace=document["metadata"]["namespace"])
        return self._write(_Request(method="POST", verb="create", resource=resource, path=path, body=document))

    def replace(self, resource: Resource, document: Document, *, subresource: str = "") -> Document:
        """Store over the version named in the document.

        Raises:
            Stale: the stored object is newer.
        """
        metadata = document["metadata"]
        path = resource.path(namespace=metadata["namespace"], name=metadata["name"], subresource=subresource)
        return self._write(_Request(method="PUT", verb="update", resource=resource, path=path, body=document))

    def merge(self, resource: Resource, patch: Document, *, namespace: str, name: str) -> Document:
        """Change only the fields named in `patch` (RFC 7386); a uid or version in it must match."""
        request = _Request(
            method="PATCH",
            verb="patch",
            resource=resource,
            path=resource.path(namespace=namespace, name=name),
            body=patch,
            content_type="application/merge-patch+json",
        )
        return self._write(request)

    def delete(self, resource: Resource, *, namespace: str, name: str, uid: str, wait_for_dependents: bool) -> None:
        """Delete this very object, never a later one of the same name.

        Raises:
            Stale: another object has the name now.
        """
        options = {
            "preconditions": {"uid": uid},
            "propagationPolicy": "Foreground" if wait_for_dependents else "Background",
        }
        path = resource.path(namespace=namespace, name=name)
        self._write(_Request(method="DELETE", verb="delete", resource=resource, path=path, body=options))

    def list(self, resource: Resource, *, namespace: str | None, selector: str = "") -> tuple[list[Document], str]:
        """Return all objects (apiVersion and kind left out) and the version to watch from.

        Raises:
            Gone: the listing took too long; start again.
        """
        found: list[Document] = []
        query: Document = {"limit": _PAGE, **({"labelSelector": selector} if selector else {})}
        path = resource.path(namespace=namespace)
        while True:
            page = self._send(_Request(method="GET", verb="list", resource=resource, path=path, query=query))
            found += page["items"]
            metadata = page["metadata"]
            if not metadata.get("continue"):
                return found, metadata["resourceVersion"]
            query = {**query, "continue": metadata["continue"]}

    def watch(
        self, resource: Resource, *, namespace: str | None, version: str, selector: str = ""
    ) -> Iterator[tuple[str, Document]]:
        """Yield (type, object) from `version` on, bookmarks included, until the server ends the watch.

        Raises:
            Gone: the version is too old; list again.
        """
        query = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": _WATCH_SECONDS}
        query |= {"resourceVersion": version, **({"labelSelector": selector} if selector else {})}
        path = resource.path(namespace=namespace)
        request = _Request(method="GET", verb="watch", resource=resource, path=path, query=query)
        with self._open(request, silence=_SILENCE_SECONDS, preload=False) as response:
            if response.status != 200:
                raise _translate(response)
            for line in _read_lines(response):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise translate(int(event["object"].get("code", 500)), json.dumps(event["object"]).encode())
                yield event["type"], event["object"]

    def _write(self, request: _Request) -> Document:
        if not self._may_write():
            raise LeadershipLost(f"{request.verb} {request.path} not sent: the lease is not held any more")
        return self._send(request)

    def _send(self, request: _Request) -> Document:
        started, status = time.monotonic(), 0
        try:
            response = self._open(request)
            status = response.status
        finally:
            self._observe_request(request.verb, request.resource.plural, status, time.monotonic() - started)
        if not 200 <= status < 300:
            raise _translate(response)
        document: Document = json.loads(response.data)
        return document

    def _open(
        self, request: _Request, *, silence: float = _ANSWER_SECONDS, preload: bool = True
    ) -> urllib3.BaseHTTPResponse:
        body = None if request.body is None else json.dumps(request.body, separators=(",", ":")).encode()
        try:
            return self._pool.request(
                request.method,
                self._credentials.server + request.url,
                body=body,
                headers=self._headers(request.content_type),
                preload_content=preload,
                timeout=urllib3.Timeout(connect=_CONNECT_SECONDS, read=silence),
            )
        except urllib3.exceptions.HTTPError as error:
            raise Unavailable(f"{request.method} {request.path}: {error}") from error

    def _headers(self, content_type: str) -> dict[str, str]:
        asked_at, token = self._token
        if asked_at == 0.0 or time.monotonic() - asked_at > _TOKEN_SECONDS:
            token = self._credentials.token()
            self._token = (time.monotonic(), token)
        headers = {"Accept": "application/json", "Content-Type": content_type, "User-Agent": "ctj-operator"}
        return {**headers, "Authorization": f"Bearer {token}"} if token else headers


def _translate(response: urllib3.BaseHTTPResponse) -> ApiError:
    return translate(response.status, response.data, retry_after=response.headers.get("Retry-After"))


def _read_lines(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    rest = b""
    try:
        for chunk in response.stream(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines
    except urllib3.exceptions.HTTPError as error:
        raise Unavailable(f"watch broken off: {error}") from error
