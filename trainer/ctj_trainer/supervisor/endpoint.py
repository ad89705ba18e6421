"""What may be asked of a running pod over HTTP: /metrics (Prometheus), /progress (JSON), /healthz."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ctj_trainer.metrics import PodMetrics
from ctj_trainer.progress import read_progress
from ctj_trainer.supervisor.settings import Settings


def serve(settings: Settings) -> str | None:
    """Serve in a daemon thread if a port is set; return a notice where that is impossible. Training goes on without."""
    if settings.metrics_port is None:
        return None
    try:
        from prometheus_client import CollectorRegistry, exposition
    except ImportError:
        return "prometheus-client is not installed: no metrics of this pod; pip install 'ctj[trainer]'"
    registry = CollectorRegistry()
    registry.register(PodMetrics(settings.run_dir, _labels(settings)))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, exposition.CONTENT_TYPE_LATEST, exposition.generate_latest(registry))
            elif self.path == "/progress":
                progress = read_progress(settings.run_dir)
                text = progress.model_dump_json(by_alias=True, exclude_none=True) if progress else "{}"
                self._answer(200 if progress else 503, "application/json", text.encode())
            elif self.path == "/healthz":
                self._answer(200, "text/plain", b"ok\n")
            else:
                self._answer(404, "text/plain", b"/metrics, /progress or /healthz\n")

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Scrapes are not worth a line each."""

    try:
        server = ThreadingHTTPServer(("", settings.metrics_port), Handler)
    except OSError as error:
        return f"port {settings.metrics_port} cannot be served ({error.strerror}): no metrics or progress of this pod"
    threading.Thread(target=server.serve_forever, name="endpoint", daemon=True).start()
    return None


def _labels(settings: Settings) -> dict[str, str]:
    job = settings.attempt.job
    return {
        "namespace": job.namespace,
        "job": job.name,
        "attempt": str(settings.attempt.attempt),
        "stage": settings.attempt.stage.name,
    }
