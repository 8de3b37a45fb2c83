"""A JSON service over HTTP on 127.0.0.1: routes are methods, errors are a status and a body."""

from __future__ import annotations

import json
import re
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


class Refused(Exception):
    """Answer with this status and body."""

    def __init__(self, status: int, body: Any = None) -> None:
        super().__init__(status, body)
        self.status, self.body = status, body if body is not None else {"error": f"status {status}"}


@dataclass
class Reply:
    """An answer with a status and headers of its own."""

    body: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


class Request:
    def __init__(self, handler: BaseHTTPRequestHandler, groups: tuple[str, ...], body: bytes) -> None:
        url = urlsplit(handler.path)
        self.path, self.query, self.groups = url.path, parse_qs(url.query), groups
        self.headers, self.raw, self.handler = handler.headers, body, handler

    @property
    def json(self) -> Any:
        return json.loads(self.raw) if self.raw else {}


Route = tuple[str, str, Callable[[Request], Any]]  # method, pattern of the path, what answers


class Service:
    """`routes` in order; whatever matches none is a misreading of the protocol and is kept in `unknown`.

    A route gives a JSON value, a `Reply`, or an iterator of bytes, which is streamed. `tls` makes it HTTPS.
    """

    def __init__(self, routes: list[Route], tls: ssl.SSLContext | None = None) -> None:
        self.unknown: list[str] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # a head and a body are two writes: the second isn't to wait

            def log_message(self, *args: Any) -> None:
                pass

            def _answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                path = urlsplit(self.path).path
                try:
                    for method, pattern, answer in routes:
                        found = re.fullmatch(pattern, path)
                        if method == self.command and found:
                            self._send(200, answer(Request(self, found.groups(), body)))
                            return
                    service.unknown.append(f"{self.command} {path}")
                    raise Refused(404, {"error": f"no route {self.command} {path}"})
                except Refused as refused:
                    self._send(refused.status, refused.body)

            do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = _answer

            def _send(self, status: int, value: Any) -> None:
                headers: Mapping[str, str] = {}
                if isinstance(value, Reply):
                    status, value, headers = value.status, value.body, value.headers
                if hasattr(value, "__next__"):
                    self._stream(status, value)
                    return
                data = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                kind = "text/plain" if isinstance(value, bytes) else "application/json"
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                for name, text in headers.items():
                    self.send_header(name, text)
                self.end_headers()
                self.wfile.write(data)

            def _stream(self, status: int, parts: Any) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                try:
                    for part in parts:
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                        self.wfile.flush()
                    self.wfile.write(b"0\r\n\r\n")
                except OSError:  # the client has gone
                    self.close_connection = True

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()
