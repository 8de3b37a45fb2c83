"""The page of a fleet that trains: a server for this machine's browser, and for nobody else.

Invariant: listens on 127.0.0.1 only, answers GET and HEAD only, and only to requests that name this machine as their
host: a page from elsewhere can't have its name point here and read the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from composer_replication.report.page import for_script, page

__all__ = ["LiveServer"]

_HOSTS = ("127.0.0.1", "localhost")


class LiveServer:
    """Serves what `look` gives; it is asked when a browser asks, but not more often than every `every_seconds`.

    `look` is called in one thread at a time. Raises OSError if the port is taken. Port 0: a free one.
    """

    def __init__(self, look: Callable[[], Mapping[str, Any]], *, port: int = 0, every_seconds: float = 2.0) -> None:
        self._look = look
        self._every = every_seconds
        self._lock = threading.Lock()
        self._values: Mapping[str, Any] | None = None
        self._looked = 0.0
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/"

    def serve(self) -> None:
        """Until `stop`, or until an exception (Ctrl-C) comes in this thread."""
        try:
            self._server.serve_forever(poll_interval=0.2)
        finally:
            self._server.server_close()

    def stop(self) -> None:
        """From another thread."""
        self._server.shutdown()

    def values(self) -> Mapping[str, Any]:
        with self._lock:
            now = time.monotonic()
            if self._values is None or now - self._looked >= self._every:
                self._values = self._look()
                self._looked = time.monotonic()
            return self._values

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        live = self

        class Handler(BaseHTTPRequestHandler):
            server_version, sys_version = "composer-replication", ""
            timeout = 60.0  # of a connection on which nothing comes

            def do_GET(self) -> None:
                self._answer(body=True)

            def do_HEAD(self) -> None:
                self._answer(body=False)

            def _answer(self, *, body: bool) -> None:
                host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
                if host not in _HOSTS:
                    self._send(403, "text/plain", b"this server answers to localhost only\n", body)
                elif self.path == "/":
                    text = page(live.values(), poll_seconds=live._every)
                    self._send(200, "text/html; charset=utf-8", text.encode(), body)
                elif self.path == "/values.json":
                    self._send(200, "application/json", for_script(live.values()).encode(), body)
                else:
                    self._send(404, "text/plain", b"not here\n", body)

            def _send(self, code: int, kind: str, content: bytes, body: bool) -> None:
                try:
                    self.send_response(code)
                    self.send_header("Content-Type", kind)
                    self.send_header("Content-Length", str(len(content)))
                    self.send_header("Cache-Control", "no-store")
                    self.send_header("X-Content-Type-Options", "nosniff")
                    self.send_header("X-Frame-Options", "DENY")
                    self.send_header("Referrer-Policy", "no-referrer")
                    self.send_header("Cross-Origin-Resource-Policy", "same-origin")
                    self.end_headers()
                    if body:
                        self.wfile.write(content)
                except (BrokenPipeError, ConnectionResetError):  # the browser has gone
                    self.close_connection = True

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing: the terminal belongs to the command."""

        return Handler
