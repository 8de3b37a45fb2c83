"""Who is averaged in a round: one rule, a pure function of what the replicas reported.

Invariant: every collective asks `select_members`, so that threads, process groups and stores decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from composer_replication.collective.base import Report

__all__ = ["OUTLIER_FACTOR", "Selection", "select_members"]

# A pseudo-gradient this many times longer than the median one is an accident, not an opinion. Honest replicas of
# one fleet differ by a small factor; a weight that has run away to 1e30 differs by more than any number here.
OUTLIER_FACTOR = 1000.0


@dataclass(frozen=True, slots=True)
class Selection:
    members: tuple[Report, ...]  # by ascending id
    absent: dict[int, str]  # id -> why it isn't averaged


def select_members(reports: Iterable[Report], *, outlier_factor: float = OUTLIER_FACTOR) -> Selection:
    """Choose whose pseudo-gradients are averaged.

    Left out, in this order: replicas with another base or layout than the lowest id's; non-finite
    pseudo-gradients; intervals without a step (or, weighted by tokens, without a token); norms above
    `outlier_factor` times the (lower) median norm of what is left. An all-zero pseudo-gradient of a replica that
    did train is a contribution like any other.
    """
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
        norms = sorted(math.sqrt(report.square_norm) for report in candidates)
        median = norms[(len(norms) - 1) // 2]
        bound = outlier_factor * median
        for report in candidates:
            norm = math.sqrt(report.square_norm)
            if median > 0 and norm > bound:
                absent[report.replica] = f"outlier: norm {norm:.3g}, median {median:.3g}"
    members = tuple(report for report in candidates if report.replica not in absent)
    return Selection(members, dict(sorted(absent.items())))
