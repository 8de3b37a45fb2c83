"""What a replica tells people with its reports: how long it trained, and how the round before its own went here.

Invariant: decides nothing. A roster is written before its round has ended; how long a replica waited in round r, and
what it moved, therefore stands in its report of round r + 1 (`last_...`, `straggler`), and whoever shows rounds shifts
it back. Of the last round that a replica took part in its result tells (`results/<replica>.json`, under `last`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from composer_replication.diloco.summary import RoundSummary

__all__ = ["TIMES", "IntervalClock", "of_before", "of_interval", "told_of"]

_ABOUT_DATA = frozenset({"first_batch", "data_seed"})  # for the other replicas to compare once

# What depends on the clock, and says nothing of a fleet whose replicas share a process.
TIMES = frozenset({"train_seconds", "last_wait_seconds", "last_exchange_seconds", "straggler", "straggler_seconds"})


class IntervalClock:
    """Seconds of the present interval, from its begin to its end; what follows the end is waiting, and isn't counted.

    Validation and checkpoints between two steps are: it is the time in which this replica's exchange rests.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = 0.0
        self._since: float | None = None

    def begin(self) -> None:
        self._seconds, self._since = 0.0, self._clock()

    def end(self, seconds: float | None = None) -> None:
        """`seconds`: those that an earlier process has counted, instead of one's own."""
        self._seconds, self._since = self.seconds if seconds is None else seconds, None

    def go_on(self) -> None:
        """With the interval that had come to its end, or was restored."""
        self._since = self._clock()

    @property
    def seconds(self) -> float:
        return self._seconds + (0.0 if self._since is None else self._clock() - self._since)


def told_of(summary: RoundSummary) -> dict[str, float]:
    """What of a round isn't in its own roster, which was written before it closed; seconds, bytes, squared norms."""
    told = {
        "last_drift": summary.drift,
        "last_mean_square_norm": summary.mean_square_norm,
        "last_wait_seconds": summary.wait_seconds,
        "last_exchange_seconds": summary.exchange_seconds,
        "last_bytes_sent": float(summary.bytes_sent),
        "last_bytes_received": float(summary.bytes_received),
    }
    if summary.straggler is not None:
        told |= {"straggler": float(summary.straggler[0]), "straggler_seconds": summary.straggler[1]}
    return {name: value for name, value in told.items() if math.isfinite(value)}


def of_before(name: str) -> bool:
    """Is this metric of a report one of the round before?"""
    return name.startswith(("last_", "straggler"))


def of_interval(metrics: Mapping[str, float]) -> dict[str, float]:
    """What a report says for people of the interval that it came with."""
    return {name: value for name, value in metrics.items() if name not in _ABOUT_DATA and not of_before(name)}
