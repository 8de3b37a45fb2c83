"""A closed round, summed up for people and adapters.

Invariant: decides nothing; the outer step has been taken and the next interval planned when it is asked.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from composer_replication.autoloco.outer import OuterCoefficients
from composer_replication.autoloco.values import Observation, Plan
from composer_replication.collective.base import Report, RoundOutcome
from composer_replication.diloco.observed import tokens_of
from composer_replication.diloco.summary import RoundSummary

__all__ = ["sum_up"]

_log = logging.getLogger("composer_replication")


def sum_up(
    outcome: RoundOutcome,
    own: Report | None,
    *,
    replica: int,
    plan: Plan,
    next_plan: Plan,
    outer: OuterCoefficients,
    observation: Observation | None,
    position: int,
    fast_forward: int,
    ended: bool,
    exchange_seconds: float,
    phase_seconds: Mapping[str, float],
) -> RoundSummary:
    """`own` is what this replica contributed, None where it only followed; `plan` the interval's, `next_plan` the next.

    Logs whose norms stuck out.
    """
    return RoundSummary(
        round=outcome.round,
        included=any(report.replica == replica for report in outcome.members),
        members=tuple(report.replica for report in outcome.members),
        absent=outcome.absent,
        outliers=_outliers(outcome),
        steps=plan.steps,
        horizon=plan.horizon,
        tokens=tokens_of(outcome.members),
        position=position,
        rho=outer.rho,
        momentum=outer.momentum,
        outer_lr=outer.lr,
        drift=observation.drift if observation else math.nan,
        mean_square_norm=outcome.mean_square_norm,
        pseudo_gradient_norm=math.sqrt(own.square_norm) if own and own.finite else math.nan,
        phase=next_plan.phase,
        assessment=next_plan.assessment,
        action=next_plan.action,
        next_plan=next_plan,
        fast_forward=fast_forward,
        restored=own is not None and not own.finite,
        wait_seconds=outcome.wait_seconds,
        exchange_seconds=exchange_seconds,
        phase_seconds=phase_seconds,
        bytes_sent=outcome.bytes_sent,
        bytes_received=outcome.bytes_received,
        ended=ended,
        lateness=outcome.lateness,
        member_metrics={report.replica: report.metrics for report in (*outcome.members, *outcome.others)},
        observation=observation,
    )


def _outliers(outcome: RoundOutcome) -> dict[int, str]:
    """Whose norms stuck out, averaged or not; each is logged."""
    left_out = {replica: why for replica, why in outcome.absent.items() if why.startswith("outlier")}
    found = dict(sorted({**outcome.outliers, **left_out}.items()))
    for replica, what in found.items():
        done = "not averaged, " if replica in left_out else ""
        _log.warning("round %d, replica %d: %s%s", outcome.round, replica, done, what)
    return found
