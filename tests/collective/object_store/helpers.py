"""Collectives over a store for tests in threads: quick polls, and one scalar tensor where that is enough."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from composer_replication.collective.base import RoundOutcome
from composer_replication.collective.object_store import ObjectStoreCollective
from composer_replication.store import MemoryStore, ObjectStore
from tests.collective.conformance import SCALAR, begin, contribution, digest, mean_of
from tests.support.threads import run_threads

QUICK: dict[str, Any] = {
    "poll_seconds": 0.002,
    "max_poll_seconds": 0.02,
    "heartbeat_seconds": 0.05,
    "timeout_seconds": 30.0,
}


class Clock:
    """A fleet's time, which a test moves on instead of sleeping: `Fleet(..., **clock.settings)`."""

    def __init__(self) -> None:
        self._ahead, self._sleeps, self._changed = 0.0, 0, threading.Condition()
        self.settings: dict[str, Any] = {"clock": lambda: time.monotonic() + self._ahead, "sleep": self._sleep}

    def _sleep(self, seconds: float) -> None:
        with self._changed:
            self._sleeps += 1
            self._changed.notify_all()
        time.sleep(seconds)

    def looks(self) -> None:
        """Wait until the one collective that waits has looked at the store, from beginning to end."""
        with self._changed:
            then = self._sleeps
            assert self._changed.wait_for(lambda: self._sleeps >= then + 2, timeout=20.0), "nobody waits"

    def move(self, seconds: float) -> None:
        """On by so much while one collective waits, which then looks again."""
        self.looks()
        self._ahead += seconds
        self.looks()


def join(store: ObjectStore, replica: int, replicas: int, **settings: Any) -> ObjectStoreCollective:
    return ObjectStoreCollective(store, replica=replica, replicas=replicas, **{**QUICK, **settings})


class Fleet:
    """Started collectives over one store, closed at the end of the block."""

    def __init__(self, replicas: int, store: ObjectStore | None = None, layout: Any = SCALAR, **settings: Any) -> None:
        self.store = store if store is not None else MemoryStore()
        self.layout = layout
        self.all = [join(self.store, replica, replicas, **settings) for replica in range(replicas)]

    def __enter__(self) -> Fleet:
        run_threads([lambda c=c: begin(c, self.layout) for c in self.all])
        return self

    def __exit__(self, *_: object) -> None:
        for collective in self.all:
            collective.close()

    def round(self, number: int, values: dict[int, float], **changes: Any) -> dict[int, Any]:
        """Each of `values` contributes that constant; gives outcomes or errors."""

        def one(replica: int) -> Any:
            flat = torch.full((self.layout.elements,), values[replica])
            return attempt(
                lambda: self.all[replica].average(contribution(replica, number, self.layout, flat, **changes))
            )

        return dict(zip(values, run_threads([lambda r=r: one(r) for r in values]), strict=True))


def attempt(call: Callable[[], Any]) -> Any:
    """What `call` gives, or the error that it raises."""
    try:
        return call()
    except Exception as error:
        return error


def scalar(outcome: RoundOutcome) -> float:
    return mean_of(outcome, SCALAR).item()


__all__ = ["QUICK", "Clock", "Fleet", "attempt", "digest", "join", "scalar"]
