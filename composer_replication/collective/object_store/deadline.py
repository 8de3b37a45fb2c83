"""How long, under skip, a replica waits for the others: learned from how late the fleet's last ones have been.

Invariant: it decides when a roster is proposed, never what is in it; and it knows no clock but this machine's own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

__all__ = ["FACTOR", "INTERVAL_PART", "RETURNING_FACTOR", "WINDOW", "Patience"]

WINDOW = 8  # rounds that are remembered
FACTOR = 2.0  # times the longest wait among them
INTERVAL_PART = 0.25  # of the time that the interval took to train: nobody is given up for less
RETURNING_FACTOR = 2.0  # times all that, for someone who has missed a round and is expected again


class Patience:
    """Seconds after its own contribution for which a replica waits when enough of the others are there.

    Twice the longest wait of any replica in the last eight rounds, but at least `floor_seconds` and a quarter of the
    time that the interval took; twice as long while someone is expected who missed one of the last two rounds; and at
    most `ceiling_seconds`. Before there is a round to learn from, `ceiling_seconds`. Only waits that ended with a
    contribution count: a replica that never comes in time teaches the others nothing.

    The fleet's longest wait and not one's own: whoever comes last has waited for nobody, and as the most impatient of
    all it would shut out the others, since anyone may propose the roster.
    """

    def __init__(self, *, floor_seconds: float, ceiling_seconds: float) -> None:
        self._floor = floor_seconds
        self._ceiling = ceiling_seconds
        self._waits: deque[float] = deque(maxlen=WINDOW)

    def seconds(self, interval_seconds: float | None, *, returning: bool = False) -> float:
        if not self._waits or interval_seconds is None or not math.isfinite(interval_seconds):
            return self._ceiling
        wanted = max(self._floor, INTERVAL_PART * interval_seconds, FACTOR * max(self._waits))
        return min(wanted * (RETURNING_FACTOR if returning else 1.0), self._ceiling)

    def saw(self, waits: Iterable[float | None]) -> None:
        """The longest wait that each replica of a closed round's roster has told; None of those who can't tell. The
        roster is the same for all, and so is what they learn."""
        told = [wait for wait in waits if wait is not None]
        if told:
            self._waits.append(max(told))
