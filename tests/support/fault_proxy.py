"""A small HTTP proxy that stands before a store's server and does to its traffic what networks do.

It forwards one request a connection, byte for byte, Host header included, so that signatures stay valid.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

Action = Literal["status", "refuse", "lose answer", "cut answer", "cut request", "delay", "stale listing"]


@dataclass
class Fault:
    """What to do to requests of `method` whose target holds `target`, with this chance, `times` times, then no
    more. "stale listing" gives the answer that the same listing got first, as long as the fault lasts."""

    action: Action
    method: str = ""
    target: str = ""
    times: int = 1
    status: int = 503
    code: str = "SlowDown"
    seconds: float = 0.0
    chance: float = 1.0
    hits: int = 0
    dice: random.Random = field(default_factory=lambda: random.Random(1))

    def fits(self, method: str, target: str) -> bool:
        if self.hits >= self.times or not method.startswith(self.method) or self.target not in target:
            return False
        if self.action == "stale listing" and not is_listing(method, target):
            return False
        return self.chance == 1.0 or self.dice.random() < self.chance


def is_listing(method: str, target: str) -> bool:
    """As S3, Google and Azure ask for one."""
    path, _, query = target.partition("?")
    return method == "GET" and ("list-type=2" in query or "comp=list" in query or (path.endswith("/o") and bool(query)))


@dataclass
class FaultProxy:
    """A block in which `endpoint` leads to `upstream`. `faults` may be changed at any time."""

    upstream: str
    faults: list[Fault] = field(default_factory=list)
    bytes_per_second: float | None = None  # of request bodies
    away: bool = False  # nobody answers
    requests: list[tuple[str, str]] = field(default_factory=list)
    body_bytes: int = 0

    def __enter__(self) -> FaultProxy:
        self._listings: dict[str, bytes] = {}
        parts = urlsplit(self.upstream)
        self._host, self._port = parts.hostname, parts.port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server: Any = self._do(asyncio.start_server(self._handle, "127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    def add(self, action: Action, **about: Any) -> Fault:
        fault = Fault(action, **about)
        self.faults.append(fault)
        return fault

    def count(self, method: str, target: str = "") -> int:
        return sum(seen.startswith(method) and target in where for seen, where in self.requests)

    def _do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=10)

    async def _close(self) -> None:
        self._server.close()
        await (
            _turns()
        )  # a connection that was accepted just now gets its handler: only a handler that runs can close it
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await _turns()  # transports close in the turn after they are told to

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._one(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # either side went away: that is what this is for
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        self.requests.append((method, target))
        if self.away:
            return
        fault = next((fault for fault in self.faults if fault.fits(method, target)), None)
        action = None
        if fault is not None:
            fault.hits += 1
            action = fault.action
            if action == "delay":
                await asyncio.sleep(fault.seconds)
        if action == "refuse":
            return
        if action == "stale listing" and target in self._listings:
            writer.write(self._listings[target])
            await writer.drain()
            return
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        kept = [line for line in lines if line and line.split(":")[0].lower() not in ("expect", "connection")]
        size = int(headers.get("content-length", 0))
        if action == "status" and fault is not None:
            await self._body(reader, None, headers, size)
            xml = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>made up</Message></Error>".encode()
            writer.write(
                f"HTTP/1.1 {fault.status} Made Up\r\nContent-Type: application/xml\r\nContent-Length: {len(xml)}\r\n"
                "Connection: close\r\n\r\n".encode()
                + (b"" if method == "HEAD" else xml)
            )
            await writer.drain()
            return
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        try:
            far_writer.write("\r\n".join([first, *kept, "Connection: close", "", ""]).encode("latin1"))
            if action == "cut request":
                await self._body(reader, far_writer, headers, size // 2)
                return
            await self._body(reader, far_writer, headers, size)
            if action == "stale listing":
                self._listings[target] = await _whole(far_reader)
                writer.write(self._listings[target])
                await writer.drain()
                return
            await self._answer(far_reader, writer, action)
        finally:
            far_writer.close()

    async def _body(
        self, reader: asyncio.StreamReader, to: asyncio.StreamWriter | None, headers: dict[str, str], size: int
    ) -> None:
        async def send(data: bytes) -> None:
            self.body_bytes += len(data)
            if to is not None:
                to.write(data)
                await to.drain()
            if self.bytes_per_second is not None:
                await asyncio.sleep(len(data) / self.bytes_per_second)

        if headers.get("transfer-encoding", "").lower() == "chunked":
            while True:
                line = await reader.readuntil(b"\r\n")
                chunk = int(line.split(b";")[0], 16)
                await send(line + await reader.readexactly(chunk + 2))
                if chunk == 0:
                    return
        while size > 0:
            data = await reader.read(min(size, 256 * 1024))
            if not data:
                raise ConnectionError("the client went away")
            size -= len(data)
            await send(data)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, action: str | None) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if action == "lose answer":
            await reader.read(-1)
            return
        lines = [line for line in head.decode("latin1").split("\r\n") if line]
        kept = [line for line in lines if not line.lower().startswith(("connection:", "keep-alive:"))]
        size = next((int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length:")), None)
        writer.write("\r\n".join([*kept, "Connection: close", "", ""]).encode("latin1"))
        left = size // 2 if action == "cut answer" and size is not None else None
        while data := await reader.read(256 * 1024 if left is None else min(left, 256 * 1024)):
            writer.write(data)
            await writer.drain()
            if left is not None:
                left -= len(data)
                if left <= 0:
                    break


async def _whole(reader: asyncio.StreamReader) -> bytes:
    """An answer, made such that it can be given again."""
    head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith((b"connection:", b"keep-alive:"))]
    return b"\r\n".join([*lines, b"Connection: close", b"", b""]) + body


async def _turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)
