"""When a run's loss first came down to a level: in steps, tokens and hours (the paper's table 2).

Invariant: a pure function of the rounds' records, so that any run that kept them can be asked afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from composer_replication.diloco.round_record import RoundRecord

__all__ = ["Crossing", "round_seconds", "thresholds"]


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """Where the smoothed loss was at or below `level` for the first time; all None if it never was."""

    level: float
    round: int | None = None
    steps: int | None = None  # inner steps of the fleet, that round's included
    tokens: int | None = None  # of all replicas; None as well if some round's aren't known
    seconds: float | None = None  # training, waiting and exchanging; None as well if some round's aren't known


def thresholds(rounds: Sequence[RoundRecord], levels: Iterable[float], *, smooth: int = 1) -> list[Crossing]:
    """For each level, when the loss reached it.

    A round's loss is its members' mean over the interval. It is averaged over the last `smooth` rounds, each weighing
    as many steps as it has; before there are so many, nothing is taken to be reached. A round of which nobody told a
    loss (or none that is finite) is left out.
    """
    if smooth < 1:
        raise ValueError(f"smooth must be at least 1, got {smooth}")
    wanted = [float(level) for level in levels]
    for level in wanted:
        if not math.isfinite(level):
            raise ValueError(f"levels must be finite numbers, got {level}")
    found: dict[float, Crossing] = {}
    last: list[tuple[int, float]] = []
    tokens: int | None = 0
    seconds: float | None = 0.0
    for one in rounds:
        own, spent = one.observed.tokens, round_seconds(one)
        tokens = None if tokens is None or own is None else tokens + own
        seconds = None if seconds is None or spent is None else seconds + spent
        if one.loss is None:
            continue
        last = [*last, (one.steps, one.loss)][-smooth:]
        if len(last) < smooth:
            continue
        mean = sum(steps * loss for steps, loss in last) / sum(steps for steps, _ in last)
        for level in wanted:
            if mean <= level and level not in found:
                found[level] = Crossing(
                    level=level, round=one.round, steps=one.position, tokens=tokens, seconds=seconds
                )
    return [found.get(level, Crossing(level=level)) for level in wanted]


def round_seconds(one: RoundRecord) -> float | None:
    """How long a round and the interval before it took the slowest of its members; None if nobody told."""
    told = [one.observed.replicas.get(replica, {}) for replica in one.observed.members]
    # Waiting is part of the exchange; where only one of them was told, that one counts.
    spent = [
        values["train_seconds"] + max(values.get("exchange_seconds", 0.0), values.get("wait_seconds", 0.0))
        for values in told
        if "train_seconds" in values
    ]
    return max(spent) if spent else None
