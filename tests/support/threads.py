"""Run one function per replica, each in a thread; the first error of any is raised here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def run_threads(functions: Sequence[Callable[[], T]], *, timeout_seconds: float = 60.0) -> list[T]:
    """Results in order. A thread that is still running at the time-out is an error."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    changed = threading.Semaphore(0)

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)
        finally:
            changed.release()

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for _ in threads:
        ended = changed.acquire(timeout=timeout_seconds)
        if errors:
            raise errors[0]
        assert ended, "a replica is still waiting"
    return [results[i] for i in range(len(functions))]
