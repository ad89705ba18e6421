"""A tiny HTTP server that answers as scripted, where an API server would be: the seam of the client's own tests."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ctj_operator.cluster.client import ApiClient, Credentials

Document = dict[str, Any]


@dataclass
class Answer:
    """One scripted answer; `lines` are watch events, sent as chunks before the connection is closed."""

    body: Document | None = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    lines: list[Document] | None = None
    broken: bool = False
    """Close in the middle of an event."""


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


class ApiStandIn:
    """Answers in order, and remembers what it was asked."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers
        self.requests: list[Request] = []
        self.url = ""

    def client(self, **options: Any) -> ApiClient:
        credentials = Credentials(
            server=self.url,
            ca_file=None,
            certificate_file=None,
            key_file=None,
            verify=True,
            token=lambda: "secret",
        )
        return ApiClient(credentials, **options)


@contextmanager
def api(*answers: Answer) -> Iterator[ApiStandIn]:
    stand_in = ApiStandIn(list(answers))
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(stand_in))
    stand_in.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield stand_in
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(stand_in: ApiStandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 5

        def _answer(self) -> None:
            target = urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            query = {name: values[0] for name, values in parse_qs(target.query).items()}
            stand_in.requests.append(Request(self.command, target.path, query, dict(self.headers), body))
            answer = stand_in.answers.pop(0)
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Connection", "close")
            if answer.lines is None:
                text = json.dumps(answer.body or {}).encode()
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)
            else:
                self._stream(answer, answer.lines)

        def _stream(self, answer: Answer, lines: list[Document]) -> None:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for line in lines:
                text = json.dumps(line).encode() + b"\n"
                middle = len(text) // 2  # events arrive in pieces
                for piece in (text[:middle], text[middle:]):
                    self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            self.wfile.write(b"ff\r\n{" if answer.broken else b"0\r\n\r\n")

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    return Handler
