"""Curves: a run's points over steps, tokens, wall-clock, rounds or bytes; and of several runs their mean with its band.

Invariant: a mean is only drawn where every run of the group has points to both sides; nothing is extrapolated.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

from composer_replication.report.measures import bytes_of
from composer_replication.report.rounds import Round
from composer_replication.report.runs import Run

__all__ = ["AXES", "Axis", "Curve", "band", "band_of_logs", "points", "thinned"]

Points = list[tuple[float, float]]
_MOST_POINTS = 2000  # of one curve: more can't be seen, and make the page slow


@dataclass(frozen=True)
class Axis:
    """What goes along the bottom. `of` gives one value a round, ascending, or None if the run doesn't know."""

    name: str
    title: str
    of: Callable[[Run], list[float] | None]


def _steps(run: Run) -> list[float] | None:
    return [float(one.position) for one in run.rounds]


def _rounds(run: Run) -> list[float] | None:
    return [float(one.round + 1) for one in run.rounds]


def _tokens(run: Run) -> list[float] | None:
    each = [one.tokens for one in run.rounds]
    known = [tokens for tokens in each if tokens is not None]
    return _sums([float(t) for t in known]) if known and len(known) == len(each) else None


def _seconds(run: Run) -> list[float] | None:
    """A round that hasn't told its times yet (the last of a running fleet) takes as long a step as the one before."""
    found: list[float] = []
    pace: float | None = None
    for one in run.rounds:
        seconds = one.seconds
        if seconds is None:
            if pace is None:
                return None
            seconds = pace * one.steps
        if one.steps:
            pace = seconds / one.steps
        found.append(seconds)
    return _sums(found) if found else None


def _megabytes(run: Run) -> list[float] | None:
    spent = bytes_of(run)
    if spent is None:
        return None
    shares = [len(one.members) if one.members else one.steps for one in run.rounds]
    whole = sum(shares)
    return _sums([spent.sent / 1e6 * share / whole for share in shares]) if whole else None


def _sums(values: Sequence[float]) -> list[float]:
    found, total = list[float](), 0.0
    for value in values:
        total += value
        found.append(total)
    return found


AXES = (
    Axis("steps", "Inner steps of each replica", _steps),
    Axis("tokens", "Tokens, all replicas together", _tokens),
    Axis("wall-clock", "Seconds since the first step", _seconds),
    Axis("rounds", "Rounds", _rounds),
    Axis("bytes", "MB sent by all replicas together", _megabytes),
)


def points(run: Run, axis: Axis, value: Callable[[Round], float | None]) -> Points:
    """(x, y) of the rounds that have both."""
    along = axis.of(run)
    if along is None:
        return []
    pairs = zip(along, (value(one) for one in run.rounds), strict=True)
    return [(x, y) for x, y in pairs if y is not None]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Mean and, of several runs, one standard deviation to both sides."""

    x: list[float]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None


def band(each: Sequence[Points], *, held: bool = False) -> Curve:
    """One curve of several. x ascends in each of them.

    `held`: a value is that of all up to its x, not only there; and the spread isn't drawn wider than the values are.
    """
    each = [one for one in each if one]
    if not each:
        return Curve(x=[], y=[])
    if len(each) == 1:
        thin = thinned(each[0])
        return Curve(x=[x for x, _ in thin], y=[y for _, y in thin])
    first, last = max(one[0][0] for one in each), min(one[-1][0] for one in each)
    xs = sorted({x for one in each for x, _ in one if first <= x <= last})
    xs = [x for x, _ in thinned([(x, 0.0) for x in xs])]
    rows = [[_held(one, x) if held else _at(one, x) for one in each] for x in xs]
    middle = [sum(row) / len(row) for row in rows]
    width = [_deviation(row, m) for row, m in zip(rows, middle, strict=True)]
    low = [m - w for m, w in zip(middle, width, strict=True)]
    high = [m + w for m, w in zip(middle, width, strict=True)]
    if held:
        low = [max(one, min(row)) for one, row in zip(low, rows, strict=True)]
        high = [min(one, max(row)) for one, row in zip(high, rows, strict=True)]
    return Curve(x=xs, y=middle, low=low, high=high)


def band_of_logs(each: Sequence[Points]) -> Curve:
    """The same of values above zero, with mean and spread of their logarithms."""
    curve = band([[(x, log(y)) for x, y in one] for one in each])
    low = None if curve.low is None else [exp(value) for value in curve.low]
    high = None if curve.high is None else [exp(value) for value in curve.high]
    return Curve(x=curve.x, y=[exp(value) for value in curve.y], low=low, high=high)


def _deviation(row: Sequence[float], mean: float) -> float:
    return sqrt(sum((value - mean) ** 2 for value in row) / (len(row) - 1))


def _at(points: Points, x: float) -> float:
    """Between two points the straight line."""
    index = bisect_left(points, (x, float("-inf")))
    if index < len(points) and points[index][0] == x:
        return points[index][1]
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _held(points: Points, x: float) -> float:
    return points[bisect_left(points, (x, float("-inf")))][1]


def thinned(points: Points) -> Points:
    """Every so many points, the last always among them."""
    every = -(-len(points) // _MOST_POINTS)
    kept = points[:: every or 1]
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]
