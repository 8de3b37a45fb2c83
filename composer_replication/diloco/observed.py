"""What a policy may see of a closed round, put together from what its replicas reported.

Invariant: a pure function of the reports and of what the round agreed on. The loops that train ask it, and so does
whoever reads a run's rosters afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from composer_replication.autoloco.means import mean
from composer_replication.autoloco.values import Observation, Preview
from composer_replication.collective.base import Report

__all__ = ["drift_of", "observe", "steps_of", "successor", "tokens_of"]


def steps_of(reports: Iterable[Report], planned: int = 0) -> int:
    """Inner steps of the longest interval; `planned` where there is none."""
    return max((report.steps for report in reports), default=planned)


def tokens_of(members: Sequence[Report]) -> int | None:
    """Of the whole roster; None if one of it didn't count."""
    counted = [report.tokens for report in members if report.tokens is not None]
    return sum(counted) if len(counted) == len(members) else None


def drift_of(members: Sequence[Report], agreed: float | None) -> float:
    """D: what the round has `agreed` on where contributions were treated, else the mean of the squared norms."""
    return mean(report.square_norm for report in members) if agreed is None else agreed


def successor(reports: Iterable[Report]) -> Report | None:
    """Of the lowest replica that goes on: by its preview all of them plan. None where nobody does."""
    return min((report for report in reports if not report.leaving), key=lambda report: report.replica, default=None)


def observe(
    reports: Iterable[Report],
    members: Sequence[Report],
    *,
    drift: float | None,
    mean_square_norm: float,
    fleet: int,
    planned: int,
    cut: bool,
    position: int,
    grid: Sequence[int],
) -> Observation | None:
    """None when no replica goes on, so that there is nothing to plan.

    Args:
        reports: of all that took part, averaged or not.
        members: of those that were averaged, by ascending replica id.
        drift: what the round agreed on; None: the mean of the members' squared norms.
        mean_square_norm: of the decoded mean; means nothing when nobody was averaged.
        fleet: replicas that the round's fleet began with.
        planned: inner steps that the interval was to have.
        cut: whether the budget's end made it that short.
        position: inner steps of the run behind it, this interval's included.
        grid: the step counts that the reports' previews hold sums for.
    """
    following = successor(reports)
    if following is None:
        return None
    return Observation(
        drift=drift_of(members, drift),
        mean_square_norm=mean_square_norm if members else math.nan,
        roster=len(members),
        fleet=fleet,
        steps=sum(report.steps for report in members),
        tokens=tokens_of(members),
        mass=mean(report.mass for report in members),
        position=position,
        truncated=cut or any(report.steps < planned for report in members),
        preview=Preview(
            steps=tuple(grid),
            sums=following.preview,
            next_lr=following.next_lr,
            remaining=following.remaining,
        ),
    )
