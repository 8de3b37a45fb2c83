"""How long a fleet would take for rounds like these: machines, links, and who waits for whom.

Invariant: pure arithmetic over rounds that have been trained, or planned; bytes and seconds of an exchange are those of
`collective/object_store/costs.py`. Strict rounds: everyone waits for the last one. Nothing fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from composer_replication.collective.object_store.costs import Link, busiest_share

__all__ = ["Machines", "RoundTime", "timeline"]


@dataclass(frozen=True, kw_only=True)
class Machines:
    """What the fleet runs on.

    Args:
        step_seconds: of one inner step on a machine of the usual speed.
        slower: by replica, how many times as long a step takes there (1.3: a third slower).
        link: every replica's way to the store, bytes per second each way.
    """

    step_seconds: float
    link: Link
    slower: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.step_seconds > 0:
            raise ValueError(f"step_seconds must be more than 0, got {self.step_seconds}")
        for name, value in (("up", self.link.up), ("down", self.link.down)):
            if not value > 0:
                raise ValueError(f"the link's {name} must be more than 0 bytes per second, got {value}")
        for replica, factor in self.slower.items():
            if not factor > 0:
                raise ValueError(f"replica {replica} can't be {factor} times as slow")


@dataclass(frozen=True, kw_only=True)
class RoundTime:
    """Seconds of one round, replica by replica. `ends` counts from the run's beginning."""

    train: tuple[float, ...]
    wait: tuple[float, ...]  # for the slowest of them
    exchange: float
    ends: float

    @property
    def slowest(self) -> int:
        return self.train.index(max(self.train))


def timeline(
    intervals: Sequence[int], machines: Machines, *, replicas: int, elements: int, codec: str
) -> list[RoundTime]:
    """The rounds after intervals of so many inner steps. `elements`: of the model's shared tensors."""
    unknown = [replica for replica in machines.slower if not 0 <= replica < replicas]
    if unknown:
        raise ValueError(f"there is no replica {unknown[0]} in a fleet of {replicas}")
    _, exchange = busiest_share(replicas, elements, codec, machines.link)
    factors = [machines.slower.get(replica, 1.0) for replica in range(replicas)]
    found: list[RoundTime] = []
    now = 0.0
    for steps in intervals:
        train = tuple(steps * machines.step_seconds * factor for factor in factors)
        longest = max(train)
        now += longest + exchange
        wait = tuple(longest - own for own in train)
        found.append(RoundTime(train=train, wait=wait, exchange=exchange, ends=now))
    return found
