"""Who is averaged in a round, and what is made of contributions that are too long: pure functions of what the
replicas reported.

Invariant: every collective asks `select_members` and `treat`, so that threads, process groups and stores decide alike.
Norms are compared with additions, products, quotients and roots only, which every machine rounds to the same bits;
there is no logarithm in here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from composer_replication.autoloco.means import mean
from composer_replication.collective.base import Report
from composer_replication.collective.guards import ROBUST_LEAST, Guards

__all__ = [
    "OUTLIER_FACTOR",
    "OUTLIER_LEAST",
    "Outlier",
    "Selection",
    "Treatment",
    "find_outliers",
    "select_members",
    "treat",
]

# A pseudo-gradient this many times longer than the median one is an accident, not an opinion. Honest replicas of
# one fleet differ by a small factor; a weight that has run away to 1e30 differs by more than any number here.
OUTLIER_FACTOR = 1000.0

# Up to this many times the median norm nothing is an outlier. Of three or four norms the median absolute deviation is
# often close to zero by chance, and of equal ones it is zero: without a floor any difference would be remarkable.
OUTLIER_LEAST = 2.0

_NORMAL_MAD = 1.4826  # standard deviation of a normal distribution, in its median absolute deviations


@dataclass(frozen=True, slots=True)
class Selection:
    members: tuple[Report, ...]  # by ascending id
    absent: dict[int, str]  # id -> why it isn't averaged


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """A norm that is remarkable among those of its round."""

    norm: float
    median: float
    score: float  # robust z: (norm - median) / (1.4826 median absolute deviations)
    bound: float  # the greatest norm that wouldn't have been one

    def __str__(self) -> str:
        return f"norm {self.norm:.3g}, median {self.median:.3g}, robust z {self.score:.3g}"

    @property
    def told(self) -> str:
        """For whoever only wants it told."""
        times = self.norm / self.median if self.median > 0 else math.inf
        return (
            f"its pseudo-gradient sticks out ({times:.3g} times the median, robust z {self.score:.3g}) and is averaged "
            "all the same; outliers='clip' or 'exclude' would treat it"
        )


@dataclass(frozen=True, slots=True)
class Treatment:
    """What is made of a roster's contributions."""

    scales: tuple[float, ...] | None = None  # float32 factor of each member; None: all are averaged as they are
    outliers: Mapping[int, str] = field(default_factory=dict[int, str])  # among the members: what was seen and done
    drift: float | None = None  # of what is averaged; None: the plain mean of the reported squared norms


def select_members(
    reports: Iterable[Report], *, guards: Guards | None = None, outlier_factor: float = OUTLIER_FACTOR
) -> Selection:
    """Choose whose pseudo-gradients are averaged.

    Left out, in this order: replicas with another base or layout than the lowest id's; non-finite
    pseudo-gradients; intervals without a step (or, weighted by tokens, without a token); norms above
    `outlier_factor` times the (lower) median norm of what is left; under outliers="exclude" those that
    `find_outliers` finds in what is left then. An all-zero pseudo-gradient of a replica that did train is a
    contribution like any other.
    """
    guards = guards or Guards()
    ordered = sorted(reports, key=lambda report: report.replica)
    absent: dict[int, str] = {}
    candidates: list[Report] = []
    for report in ordered:
        if report.base != ordered[0].base:
            absent[report.replica] = "its interval started from another state"
        elif report.layout != ordered[0].layout:
            absent[report.replica] = "it trained other tensors"
        elif not report.finite or not math.isfinite(report.square_norm):
            absent[report.replica] = "not finite"
        elif report.steps == 0:
            absent[report.replica] = "no steps"
        elif not report.weight > 0:
            absent[report.replica] = "no tokens"
        else:
            candidates.append(report)
    if candidates:
        norms = sorted(_norm(report) for report in candidates)
        median = norms[(len(norms) - 1) // 2]
        bound = outlier_factor * median
        for report in candidates:
            norm = _norm(report)
            if median > 0 and norm > bound:
                absent[report.replica] = f"outlier: norm {norm:.3g}, median {median:.3g}"
    if guards.outliers == "exclude":
        left = [report for report in candidates if report.replica not in absent]
        found = find_outliers(left, guards.outlier_threshold)
        absent |= {replica: f"outlier: {outlier}" for replica, outlier in found.items()}
    members = tuple(report for report in candidates if report.replica not in absent)
    return Selection(members, dict(sorted(absent.items())))


def find_outliers(reports: Sequence[Report], threshold: float) -> dict[int, Outlier]:
    """The reports whose norms stick out above the others', by ascending id.

    A norm is an outlier if its robust z-score is above `threshold` and it is more than OUTLIER_LEAST times the median.
    Only long ones are: a short contribution can't carry the mean away, and a partial interval is short. Fewer than
    three reports have none, since of two nobody can say which one is odd. Fewer than half are outliers, always.
    """
    if len(reports) < ROBUST_LEAST:
        return {}
    median = _median([_norm(report) for report in reports])
    if median == 0.0:
        return {}
    deviation = _NORMAL_MAD * _median([abs(_norm(report) - median) for report in reports])
    bound = max(median + threshold * deviation, OUTLIER_LEAST * median)
    found: dict[int, Outlier] = {}
    for report in sorted(reports, key=lambda report: report.replica):
        norm = _norm(report)
        if norm > bound:
            score = (norm - median) / deviation if deviation > 0.0 else math.inf
            found[report.replica] = Outlier(norm=norm, median=median, score=score, bound=bound)
    return found


def treat(members: Sequence[Report], guards: Guards) -> Treatment:
    """What is made of a roster's contributions: a function of the reports in the roster and of the fleet's settings."""
    outliers: dict[int, Outlier] = {}
    if guards.outliers in ("warn", "clip"):  # "exclude" has found its own before
        outliers = find_outliers(members, guards.outlier_threshold)
    told = {replica: outlier.told for replica, outlier in outliers.items()}
    scales: tuple[float, ...] | None = None
    if outliers and guards.outliers == "clip":
        scales = tuple(_scale(outliers.get(report.replica)) for report in members)
        factors = {report.replica: scale for report, scale in zip(members, scales, strict=True)}
        told = {replica: f"{outlier}: scaled by {factors[replica]:.3g}" for replica, outlier in outliers.items()}
    return Treatment(scales, told, _drift(members, scales, guards.trim(len(members))))


def _scale(outlier: Outlier | None) -> float:
    return 1.0 if outlier is None else float(np.float32(outlier.bound / outlier.norm))


def _drift(members: Sequence[Report], scales: Sequence[float] | None, trim: int | None) -> float | None:
    """The members' squared norms, of what is averaged, brought together as the contributions are."""
    if not members or (scales is None and trim is None):
        return None
    squares = [
        report.square_norm * scale * scale
        for report, scale in zip(members, scales or [1.0] * len(members), strict=True)
    ]
    if trim:
        squares = sorted(squares)[trim : len(squares) - trim]
    return mean(squares)


def _norm(report: Report) -> float:
    return math.sqrt(report.square_norm)


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return low + (high - low) / 2
