"""How long a fleet takes for given intervals, on given machines and links: who trains, waits, fails, and is missed.

Invariant: each replica's seconds add up to the whole: trained, trained in vain, exchanged, waited, gone. Intervals are
the fleet's, and don't change because somebody was missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from composer_replication.collective.layout import DEFAULT_CHUNK_ELEMENTS
from composer_replication.collective.object_store.roster import next_expected
from composer_replication.simulation.exchange import Exchange
from composer_replication.simulation.machines import Machines
from composer_replication.simulation.replica_time import Parts, ReplicaClock
from composer_replication.simulation.rules import Decision, Rules, decide

__all__ = ["RoundTime", "Rules", "Timeline", "timeline"]


@dataclass(frozen=True, kw_only=True)
class RoundTime:
    """One round; `parts` are each replica's seconds in it. `began` and `ends` count from the run's beginning."""

    steps: int
    members: tuple[int, ...]
    parts: tuple[Parts, ...]
    ends: float  # for the last of its members

    @property
    def absent(self) -> tuple[int, ...]:
        return tuple(replica for replica in range(len(self.parts)) if replica not in self.members)

    @property
    def slowest(self) -> int:
        """Who waited least among those averaged: the others waited for it."""
        return min(self.members, key=lambda replica: self.parts[replica].wait)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A whole run. `aborted` says why it ended before its last round, if it did, and `remedy` what would help."""

    rounds: tuple[RoundTime, ...]
    totals: tuple[Parts, ...]  # by replica
    lost: tuple[int, ...]  # intervals that each replica trained in vain, or had to begin again
    seconds: float
    aborted: str = ""
    remedy: str = ""

    @property
    def utilisation(self) -> tuple[float, ...]:
        """The part of the time in which each replica trained, and it counted."""
        return tuple(parts.train / self.seconds if self.seconds else 0.0 for parts in self.totals)

    @property
    def short_rounds(self) -> int:
        """Rounds in which somebody was missing."""
        return sum(1 for one in self.rounds if one.absent)

    def absences(self, replica: int) -> int:
        return sum(1 for one in self.rounds if replica in one.absent)


def timeline(
    intervals: Sequence[int],
    machines: Machines,
    *,
    replicas: int,
    elements: int,
    codec: str,
    rules: Rules | None = None,
    chunk_elements: int = DEFAULT_CHUNK_ELEMENTS,
) -> Timeline:
    """The rounds after intervals of so many inner steps. `elements`: of the model's shared tensors.

    Raises ValueError for machines or rules that such a fleet can't have, or on which an interval never ends.
    """
    machines.check_fleet(replicas)
    rules = rules or Rules()
    policy = rules.policy(replicas)
    exchange = Exchange(machines, elements, codec, chunk_elements=chunk_elements)
    clocks = [ReplicaClock(replica, machines, rules, policy, exchange) for replica in range(replicas)]
    expected, misses = policy.fleet, dict[int, int]()
    rounds: list[RoundTime] = []
    aborted = remedy = ""
    for number, steps in enumerate(intervals):
        for clock in clocks:
            clock.begin(steps)
        ready = {clock.replica: clock.ready for clock in clocks}
        limits = {clock.replica: clock.limits(expected) for clock in clocks}
        decision = decide(policy, number, expected, ready, limits)
        if not decision.members:
            gone = [replica for replica in decision.missing if math.isinf(ready[replica])]
            aborted, remedy = _why(number, decision, gone, rules), _remedy(number, gone, rules)
            for clock in clocks:
                clock.give_up(decision.at)
            break
        members = decision.members
        trained = {replica: clocks[replica].trained for replica in members}
        ends, written = exchange.ends(trained, decision.at, number)
        delay = 0.0
        if not exchange.shares(len(members), number)[0].direct:
            delay = _takeover(clocks, members, decision.at, written, rules)
        alive = {clock.replica for clock in clocks if clock.alive_at <= decision.at}
        late = alive - set(members) - set(expected)
        for place, replica in enumerate(members):
            clocks[replica].take_part(ends[replica] + delay, place, len(members), number)
        for clock in clocks:
            if clock.replica not in members:
                clock.miss(decision.at, written + delay, len(members), number)
        told = {replica: clocks[replica].watcher.longest for replica in members}
        for clock in clocks:
            clock.watcher.closed({replica: ready[replica] for replica in members}, told)
        misses, expected = next_expected(expected, misses, policy, members, late=late)
        over = max((c.free for c in clocks if c.replica in members and math.isfinite(c.free)), default=decision.at)
        rounds.append(RoundTime(steps=steps, members=members, parts=tuple(c.parts for c in clocks), ends=over))
    whole = max(clock.last for clock in clocks)
    for clock in clocks:
        clock.end(whole)
    if rounds and not aborted:  # the end belongs to the last round
        rounds[-1] = replace(rounds[-1], parts=tuple(clock.parts for clock in clocks), ends=whole)
    return Timeline(
        rounds=tuple(rounds),
        totals=tuple(clock.total for clock in clocks),
        lost=tuple(clock.intervals_lost for clock in clocks),
        seconds=whole,
        aborted=aborted,
        remedy=remedy,
    )


def _takeover(
    clocks: Sequence[ReplicaClock], members: Sequence[int], decided: float, written: float, rules: Rules
) -> float:
    """How long the others are held up by one that is killed after it was counted, and before its means are written."""
    held_up = 0.0
    for replica in members:
        back = clocks[replica].back_from_outage(written)
        if back is not None:
            held_up = max(held_up, min(rules.takeover_seconds, back - decided))
    return held_up


def _why(number: int, decision: Decision, gone: Sequence[int], rules: Rules) -> str:
    if math.isinf(decision.at):
        return f"round {number} never closes: all replicas are gone for good"
    who = ", ".join(map(str, decision.missing))
    these = f"replica {who}" if len(decision.missing) == 1 else f"replicas {who}"
    seconds = rules.timeout_seconds if number else rules.start_seconds
    missed = f"{these} missed for more than {seconds:g} s" + (" (gone for good)" if gone else "")
    if not number:
        why = "the first round needs everybody"
    else:
        why = "strict needs everybody" if rules.failure_policy == "strict" else "too few were there"
    return f"round {number} is given up: {missed}, and {why}"


def _remedy(number: int, gone: Sequence[int], rules: Rules) -> str:
    """In the names of a recipe's settings; "" if none would help."""
    setting = "fleet.timeout_seconds" if number else "fleet.start_timeout_seconds"
    found = [] if gone else [f"a longer {setting} waits"]
    if number:
        strict = rules.failure_policy == "strict"
        found.append("fleet.failure_policy=skip goes on without" if strict else "a smaller fleet.min_replicas goes on")
    return "; ".join(found)
