"""How a fleet treats those who are missing: its recipe's settings, and what each replica learns about the others.

Invariant: who is needed, how long is waited and who is expected next is asked of the functions that real rounds use.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from composer_replication.collective.guards import Guards
from composer_replication.collective.object_store.collective import START_SECONDS
from composer_replication.collective.object_store.deadline import Patience
from composer_replication.collective.object_store.roster import Policy
from composer_replication.collective.object_store.settings import make_patience, make_policy
from composer_replication.recipe import Recipe

__all__ = ["Decision", "Rules", "Watcher", "decide"]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """As in a recipe's `fleet`; the rest as the object-store collective has it unless told otherwise."""

    failure_policy: str = "strict"
    min_replicas: int | None = None
    timeout_seconds: float = 600.0
    start_timeout_seconds: float | None = None
    deadline: str = "adaptive"
    deadline_floor_seconds: float = 10.0
    heartbeat_seconds: float = 5.0
    tolerated_misses: int = 1

    @staticmethod
    def of(recipe: Recipe) -> Rules:
        fleet = recipe.fleet
        return Rules(
            failure_policy=fleet.failure_policy,
            min_replicas=fleet.min_replicas,
            timeout_seconds=fleet.timeout_seconds,
            start_timeout_seconds=fleet.start_timeout_seconds,
            deadline=fleet.deadline,
        )

    def policy(self, replicas: int) -> Policy:
        """Raises ValueError for settings that such a fleet can't have."""
        return make_policy(
            replica=0,
            replicas=replicas,
            failure_policy=self.failure_policy,
            min_replicas=self.min_replicas,
            tolerated_misses=self.tolerated_misses,
            mode="auto",
            guards=Guards(),
        )

    @property
    def takeover_seconds(self) -> float:
        """After how long another replica averages what its owner doesn't."""
        return min(30.0, self.timeout_seconds / 10)

    @property
    def start_seconds(self) -> float:
        if self.start_timeout_seconds is not None:
            return self.start_timeout_seconds
        return max(START_SECONDS, self.timeout_seconds)


class Watcher:
    """What one replica's process knows of the others' lateness; a restarted one knows nothing."""

    def __init__(self, rules: Rules, policy: Policy, replica: int) -> None:
        self._rules, self._policy, self._replica = rules, policy, replica
        self._patience: Patience | None
        self.restarted()

    def restarted(self) -> None:
        rules = self._rules
        self._patience = make_patience(
            rules.deadline, self._policy, rules.deadline_floor_seconds, rules.timeout_seconds
        )
        self._present: deque[frozenset[int]] = deque(maxlen=2)
        self._fresh = True  # others may be starting still
        self.longest: float | None = None  # what it tells with its next contribution

    def limits(self, interval_seconds: float, expected: Collection[int]) -> tuple[float, float]:
        """(how long it waits if enough are there, how long otherwise), after its own contribution."""
        if self._fresh:
            return self._rules.start_seconds, self._rules.start_seconds
        limit = self._rules.timeout_seconds
        if self._patience is None:
            return limit, limit
        others = set(expected) - {self._replica}
        returning = any(not others <= present for present in self._present)
        return min(self._patience.seconds(interval_seconds, returning=returning), limit), limit

    def closed(self, ready: Mapping[int, float], told: Mapping[int, float | None]) -> None:
        """A round has closed with these members, which were ready then, and had told these waits."""
        if self._patience is not None:
            self._patience.saw(told.values())
        self._present.append(frozenset(ready))
        took_part, usual = self._replica in ready, not self._fresh
        self.longest = max(ready.values()) - ready[self._replica] if took_part and usual else None
        self._fresh = self._fresh and not took_part


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Who is averaged, and when that was settled; without members the round was given up, for want of `missing`."""

    at: float
    members: tuple[int, ...]
    missing: tuple[int, ...]


def decide(
    policy: Policy,
    round: int,
    expected: tuple[int, ...],
    ready: Mapping[int, float],
    limits: Mapping[int, tuple[float, float]],
) -> Decision:
    """What a round comes to whose contributions are in the store at these moments (infinite: never).

    It closes when all that are expected are there, or when someone has waited as long as it will and enough are; and is
    given up when someone's time is over and there are too few.
    """
    moments = sorted({moment for moment in ready.values() if math.isfinite(moment)})
    everybody = max((ready[replica] for replica in expected), default=math.inf)
    enough = math.inf
    if not policy.strict:
        for moment in moments:
            if policy.enough([r for r, own in ready.items() if own <= moment], expected, round):
                enough = moment
                break
    closes, given_up = everybody, math.inf
    for replica, own in ready.items():
        if math.isfinite(own):
            patience, timeout = limits[replica]
            if enough <= own + timeout:
                closes = min(closes, max(own + patience, enough))
            else:
                given_up = min(given_up, own + timeout)
    at = min(closes, given_up)
    missing = tuple(replica for replica in expected if ready[replica] > at or math.isinf(ready[replica]))
    if closes > given_up or not math.isfinite(closes):
        return Decision(at=at, members=(), missing=missing)
    return Decision(at=at, members=tuple(r for r in sorted(ready) if ready[r] <= at), missing=missing)
