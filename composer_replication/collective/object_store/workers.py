"""The threads behind a round: transfers each way, and averaging; and the wait for any of them.

Invariant: what is in flight is bounded, and nothing runs any more after `stop`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from composer_replication.store.retry import obey

__all__ = ["Workers"]

AVERAGING = 2  # one computes while the other writes what it has computed
IN_FLIGHT_BYTES = 32 * 1024 * 1024  # each way
MAX_DOWNLOADS = 8
MAX_UPLOADS = 3  # enough to fill a link; with more of them side by side the first would be there later

_T = TypeVar("_T")


class Workers:
    """Threads start when they are first needed. `chunk_bytes`: of the largest chunk."""

    def __init__(self, chunk_bytes: int, sleep: Callable[[float], None]) -> None:
        room = max(2, IN_FLIGHT_BYTES // max(chunk_bytes, 1))
        self.sending, self.receiving = min(room, MAX_UPLOADS), min(room, MAX_DOWNLOADS)  # at a time
        self._given_up = threading.Event()
        self.uploads = self._pool(self.sending, "upload")
        self.downloads = self._pool(self.receiving, "download")
        self.averages = self._pool(AVERAGING, "average")
        self.means = self._pool(1, "mean")  # in order: everybody waits for the first
        self._sleep = sleep
        self._changed = threading.Event()
        self._lock = threading.Lock()
        self._running = 0

    def _pool(self, threads: int, name: str) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(threads, name, initializer=obey, initargs=(self._given_up,))

    @property
    def active(self) -> bool:
        """Is something being done that `wait` would wait for, or has it just been?"""
        return self._running > 0 or self._changed.is_set()

    def begin(self, pool: ThreadPoolExecutor, call: Callable[[], _T]) -> Future[_T]:
        """Start `call`; its end ends a `wait`."""
        with self._lock:
            self._running += 1
        future = pool.submit(call)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _: Future[_T]) -> None:
        with self._lock:
            self._running -= 1
        self._changed.set()

    def wait(self, seconds: float) -> None:
        """Until something has ended since the last wait, at most `seconds`; if nothing runs, just sleep."""
        if self.active:
            self._changed.wait(seconds)
            self._changed.clear()
        else:
            self._sleep(seconds)

    def give_up(self) -> None:
        """Nobody needs any more what is being done: requests that fail aren't tried again."""
        self._given_up.set()

    def stop(self) -> None:
        """Drop what hasn't begun, and wait for what has."""
        for pool in (self.averages, self.means, self.uploads, self.downloads):
            pool.shutdown(wait=False, cancel_futures=True)
        for pool in (self.averages, self.means, self.uploads, self.downloads):
            pool.shutdown(wait=True)
