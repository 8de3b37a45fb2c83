"""Collectives over a store for tests in threads: quick polls, and one scalar tensor where that is enough."""

from __future__ import annotations

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


__all__ = ["QUICK", "Fleet", "attempt", "digest", "join", "scalar"]
