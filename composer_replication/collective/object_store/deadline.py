"""How long, under skip, a replica waits for the others: learned from how late they have been.

Invariant: it decides when a roster is proposed, never what is in it; and it knows no clock but this machine's own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

__all__ = ["FACTOR", "INTERVAL_PART", "WINDOW", "Patience"]

WINDOW = 8  # rounds that are remembered
FACTOR = 2.0  # times the longest wait among them
INTERVAL_PART = 0.25  # of the time that the interval took to train: nobody is given up for less


class Patience:
    """Seconds after its own contribution for which a replica waits when enough of the others are there.

    Twice the longest wait of the last eight rounds, but at least `floor_seconds` and a quarter of the time that the
    interval took, and at most `ceiling_seconds`; before there is a round to learn from, `ceiling_seconds`. Only waits
    that ended with a contribution count: a replica that never comes in time teaches the others nothing.
    """

    def __init__(self, *, floor_seconds: float, ceiling_seconds: float) -> None:
        self._floor = floor_seconds
        self._ceiling = ceiling_seconds
        self._waits: deque[float] = deque(maxlen=WINDOW)

    def seconds(self, interval_seconds: float | None) -> float:
        if not self._waits or interval_seconds is None or not math.isfinite(interval_seconds):
            return self._ceiling
        wanted = max(self._floor, INTERVAL_PART * interval_seconds, FACTOR * max(self._waits))
        return min(wanted, self._ceiling)

    def saw(self, lateness: Mapping[int, float]) -> None:
        """How long after this replica's own contribution each of the others' was seen, in a round that has closed."""
        self._waits.append(max((0.0, *lateness.values())))
