"""What a replica of several processes settles before its first step.

Invariant: each question is asked of all ranks, and answered alike on all of them.
"""

from __future__ import annotations

from composer_replication.adapter.meeting import Meet
from composer_replication.collective.base import Collective
from composer_replication.diloco.ranks.channel import Ranks
from composer_replication.diloco.ranks.loop import Unheard
from composer_replication.isolate import Identity

__all__ = ["check_one_replica", "meet_with"]


def check_one_replica(ranks: Ranks, identity: Identity) -> None:
    """Raises ValueError, on all ranks, if this process group spans several replicas."""
    said = ranks.collect((identity.replica, identity.replicas))
    if len(set(said)) > 1:
        raise ValueError(
            f"one process group of {ranks.size} processes spans several replicas ({_names(said)}): the trainer would "
            "average their gradients at every step; start the script with `-m composer_replication.run "
            "--ranks-per-replica K SCRIPT ...`, which gives each replica a world of its own"
        )


def _names(said: list[tuple[int, int]]) -> str:
    return ", ".join(f"{replica} of {replicas}" for replica, replicas in dict.fromkeys(said))


def meet_with(ranks: Ranks | None, meet: Meet, fit: int, identity: Identity) -> Collective:
    """The collective of this process: that of the replica on rank 0, and one that says nothing on the others."""
    if ranks is None:
        return meet(fit)
    if ranks.leads:
        return ranks.lead(lambda: meet(fit), lambda met: None)
    ranks.serve({})
    return Unheard(identity.replica, tuple(range(identity.replicas)))
