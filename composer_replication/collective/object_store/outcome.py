"""What a closed round comes to, as the outer loop takes it.

Invariant: all of it but how it went here follows from the round's pointers.
"""

from __future__ import annotations

from torch import Tensor

from composer_replication.collective.base import RoundOutcome
from composer_replication.collective.guards import Guards
from composer_replication.collective.membership import treat
from composer_replication.collective.object_store.events import Closed
from composer_replication.collective.object_store.shards import ShardWork
from composer_replication.errors import RoundError

__all__ = ["outcome_of"]


def outcome_of(
    closed: Closed,
    work: ShardWork,
    guards: Guards,
    *,
    fleet_size: int,
    wait_seconds: float,
    bytes_sent: int,
    bytes_received: int,
) -> RoundOutcome:
    roster = closed.roster
    members, others, absent = roster.members, roster.others, dict(roster.absent)
    square_norm = 0.0
    for fact in closed.chunks:
        square_norm += fact.square_norm
    if not all(fact.finite for fact in closed.chunks):
        absent |= {report.replica: "the mean is not finite" for report in members}
        others = tuple(sorted((*members, *others), key=lambda report: report.replica))
        members, square_norm = (), 0.0
    treatment = treat(members, guards)

    def mean(index: int, out: Tensor) -> None:
        if not members:
            raise RoundError(f"round {roster.round} averaged nobody: there is no mean")
        work.mean(index, out)

    return RoundOutcome(
        round=roster.round,
        members=members,
        absent=dict(sorted(absent.items())),
        others=others,
        outliers=treatment.outliers,
        drift=treatment.drift,
        expected_next=roster.expected_next,
        fleet_size=fleet_size,
        mean_square_norm=square_norm,
        mean=mean,
        lateness=closed.lateness,
        wait_seconds=wait_seconds,
        phase_seconds=work.seconds,
        bytes_sent=bytes_sent,
        bytes_received=bytes_received,
    )
