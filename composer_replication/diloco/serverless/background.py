"""One thread that does jobs one after another, in the order in which they came.

Invariant: what belongs to it (a collective) is touched by no other thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["Background"]

T = TypeVar("T")


class Background:
    """A daemon thread: a process whose training has failed ends without waiting for a round's time limit."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], T]) -> Future[T]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._jobs.put((future, job))
        return future

    def run(self, job: Callable[[], T]) -> T:
        """Do a job in its turn, and wait for it."""
        return self.submit(job).result()

    def stop(self) -> None:
        """End the thread after the jobs that it has. Harmless when called again."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not None:
            future, job = entry
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            del entry, future, job  # no result is kept alive by the thread that waits for the next one
