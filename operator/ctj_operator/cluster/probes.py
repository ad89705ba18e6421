"""Answers /metrics, /healthz and /readyz on one port, of leaders and of followers alike."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

Probe = Callable[[], str]
"""Returns what is wrong, or nothing."""


class ProbeServer:
    """A small HTTP server in daemon threads."""

    def __init__(self, *, port: int, registry: CollectorRegistry, healthy: Probe, ready: Probe):
        self._server = ThreadingHTTPServer(
            ("", port), _build_handler(registry, {"/healthz": healthy, "/readyz": ready})
        )
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]

    def start(self) -> None:
        """Serve until the process ends."""
        threading.Thread(target=self._server.serve_forever, name="probes", daemon=True).start()

    def stop(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()


def _build_handler(registry: CollectorRegistry, probes: dict[str, Probe]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """One request."""

        def do_GET(self) -> None:
            """Answer a known path."""
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, generate_latest(registry), CONTENT_TYPE_LATEST)
            elif path in probes:
                problem = probes[path]()
                self._answer(503 if problem else 200, (problem or "ok").encode(), "text/plain")
            else:
                self._answer(404, b"not found", "text/plain")

        def log_message(self, format: str, *arguments: object) -> None:
            """Stay silent: probes come every few seconds."""

        def _answer(self, code: int, body: bytes, content_type: str) -> None:
            self.send_response(code)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler
