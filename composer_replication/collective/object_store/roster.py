"""Who is averaged: from what the replicas declared to the roster that is proposed. Pure functions.

Invariant: a roster is proposed by one replica and read by all; nothing in it is measured or decided a second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from composer_replication.collective.guards import Guards
from composer_replication.collective.membership import select_members
from composer_replication.collective.object_store.pointers import Ready, Roster
from composer_replication.collective.object_store.wire import pointer_hash

__all__ = [
    "DIRECT_BYTES",
    "OTHER_TENSORS",
    "Declared",
    "Plan",
    "Policy",
    "divide",
    "next_expected",
    "propose",
    "shard_chunks",
    "shard_range",
    "takeover_order",
]

DIRECT_BYTES = 4 * 1024 * 1024  # up to this payload a replica, reading everything is faster than two more phases
MAX_SHARES = 8  # shards that one owner has at most
MAX_SHARDS = 64  # of a round, unless it has more members: each shard is a pointer, which everyone reads

OTHER_TENSORS = "it trained other tensors"  # why a replica isn't averaged, in select_members's words

Mode = Literal["auto", "direct", "sharded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The fleet's settings for membership: equal on all replicas (fleet.json holds them)."""

    strict: bool
    fleet: tuple[int, ...]
    min_replicas: int
    tolerated_misses: int = 1
    mode: Mode = "auto"
    first_round: int = 0  # of the run, or of the epoch
    guards: Guards = field(default_factory=Guards)

    def needed(self, expected: Sequence[int], round: int) -> int:
        """How many must be there to close a round without the rest."""
        if self.strict or round == self.first_round:  # a lone or fresh replica is never the authority
            return len(expected)
        return min(self.min_replicas, len(expected))

    def enough(self, here: Collection[int], expected: Sequence[int], round: int) -> bool:
        """Can a round close with those who are `here`? Newcomers, whom nobody expects yet, count like everyone, but
        not in the first round, which needs all that are expected."""
        first = self.strict or round == self.first_round
        counted = [replica for replica in here if not first or replica in expected]
        return len(counted) >= self.needed(expected, round)


@dataclass(frozen=True, slots=True)
class Declared:
    """One replica's ready as the store holds it: the value, and the hash of its bytes."""

    ready: Ready
    hash: str

    @staticmethod
    def of(ready: Ready, data: bytes) -> Declared:
        return Declared(ready, pointer_hash(data))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a replica knows before a round: taken from the last roster, so that it is the same on all."""

    run: str
    round: int
    prev: str  # hash of the last round's roster
    base: str  # digest that the interval started from
    expected: tuple[int, ...]
    misses: Mapping[int, int] = field(default_factory=dict[int, int])


def propose(
    plan: Plan,
    policy: Policy,
    attempt: int,
    declared: Mapping[int, Declared],
    *,
    damaged: Mapping[int, str],
    late: frozenset[int],
    banned: Mapping[int, str],
    writer: tuple[int, int],
) -> Roster:
    """The roster for what was found at this attempt: readies, damaged readies, and who is late but alive.

    `banned` are culprits of earlier attempts. The answer is an abort when the policy doesn't let the round close.
    Does not know, nor care, which base is the proposer's: the strict majority's counts.
    """
    reports = {
        replica: found.ready.report
        for replica, found in sorted(declared.items())
        if found.ready.report is not None and replica not in banned
    }
    blank = Roster(
        run=plan.run, round=plan.round, attempt=attempt, writer=writer, kind="abort", prev=plan.prev, base=plan.base
    )
    missing = tuple(replica for replica in plan.expected if replica not in reports)
    if reports:
        base, holders = Counter(report.base for report in reports.values()).most_common(1)[0]
        if 2 * holders <= len(reports):
            return _abort(blank, missing, {}, "no strict majority of the replicas starts from the same state")
        differing = {
            replica: "its interval started from another state"
            for replica, report in reports.items()
            if report.base != base
        }
    else:
        base, differing = plan.base, dict[int, str]()
    if policy.strict:
        layout = next((report.layout for replica, report in reports.items() if replica not in differing), "")
        differing |= {
            replica: OTHER_TENSORS
            for replica, report in reports.items()
            if replica not in differing and report.layout != layout
        }
        if damaged or differing:
            blank = replace(blank, layout=layout)  # for whoever differs from it to say how
            return _abort(blank, missing, {**differing, **damaged}, "not all replicas are in the same state")
    odd: set[int] = set()
    if not policy.strict:
        # One odd replica, even the lowest, must not shut out those who trained the same tensors.
        layouts = Counter(report.layout for replica, report in reports.items() if replica not in differing)
        if layouts and 2 * layouts.most_common(1)[0][1] > layouts.total():
            usual = layouts.most_common(1)[0][0]
            odd = {r for r, report in reports.items() if r not in differing and report.layout != usual}
            differing |= dict.fromkeys(odd, OTHER_TENSORS)
    sound = {replica: report for replica, report in reports.items() if replica not in differing}
    # The first round asks whether everyone has come, which a culprit has too; later ones ask for enough to average.
    here = {*sound, *((*banned, *odd) if plan.round == policy.first_round else ())}
    if not policy.enough(here, plan.expected, plan.round):
        return _abort(blank, missing, {}, "too few replicas were ready in time")

    selection = select_members(sound.values(), guards=policy.guards)
    members = tuple(report for report in selection.members if report.weight > 0.0)
    absent = dict(selection.absent)
    absent |= {report.replica: "its weight is 0" for report in selection.members if report.weight <= 0.0}
    absent |= {replica: "not ready in time" for replica in missing}
    absent |= {**differing, **damaged, **banned}
    leaving = {replica for replica, report in sound.items() if report.leaving}
    misses, expected_next = next_expected(plan.expected, plan.misses, policy, sound, leaving=leaving, late=late)
    facts = declared[members[0].replica].ready.chunks if members else ()
    direct, owners = divide(
        policy.mode,
        tuple(report.replica for report in members),
        plan.round,
        chunks=len(facts),
        payload_bytes=sum(fact.size for fact in facts),
    )
    return Roster(
        run=plan.run,
        round=plan.round,
        attempt=attempt,
        writer=writer,
        kind="roster",
        prev=plan.prev,
        base=base,
        layout=members[0].layout if members else "",
        mode="direct" if direct else "sharded",
        shards=len(owners),
        owners=owners,
        members=members,
        hashes=tuple(declared[report.replica].hash for report in members),
        others=tuple(report for report in sound.values() if report not in members),
        absent=dict(sorted(absent.items())),
        misses=misses,
        expected_next=expected_next,
    )


def _abort(blank: Roster, missing: tuple[int, ...], differing: Mapping[int, str], reason: str) -> Roster:
    return replace(blank, missing=missing, differing=dict(sorted(differing.items())), reason=reason)


def next_expected(
    expected: Sequence[int],
    misses: Mapping[int, int],
    policy: Policy,
    present: Collection[int],
    *,
    leaving: Collection[int] = (),
    late: Collection[int] = (),
) -> tuple[dict[int, int], tuple[int, ...]]:
    """(how many rounds in a row each has missed, of those still waited for; who is waited for in the next round)."""
    staying = set(present) - set(leaving)
    if not staying and present:
        return {}, ()  # who was there has finished: there is nobody left to wait for the others
    missed = {
        replica: misses.get(replica, 0) + 1 for replica in expected if replica not in present and replica not in late
    }
    tolerated = {replica for replica, count in missed.items() if policy.strict or count <= policy.tolerated_misses}
    following = (staying | tolerated | set(late)) - set(leaving)
    return {replica: missed[replica] for replica in sorted(tolerated)}, tuple(sorted(following))


def takeover_order(members: tuple[int, ...], round: int) -> tuple[int, ...]:
    """The members, rotated by the round: nobody always comes first."""
    first = round % len(members)
    return members[first:] + members[:first]


def divide(
    mode: Mode, members: tuple[int, ...], round: int, *, chunks: int, payload_bytes: int
) -> tuple[bool, tuple[int, ...]]:
    """How a round's work is shared out: whether everyone reads everything (direct), and the owner of each shard.

    Neighbouring shards belong to one owner, so that parts differ by one chunk at most. An owner has several shards
    where there are chunks enough: the first can be fetched while the others are still being averaged.
    """
    if not members:
        return mode != "sharded", ()
    direct = mode == "direct" or (mode == "auto" and (len(members) == 1 or payload_bytes <= DIRECT_BYTES))
    count = len(members)
    shares = max(1, min(MAX_SHARES, MAX_SHARDS // count))
    shards = 1 if direct else max(1, min(count * shares, chunks))
    order = takeover_order(members, round)
    return direct, tuple(order[shard * count // shards] for shard in range(shards))


def shard_range(shards: int, shard: int, chunks: int) -> range:
    """The chunks of a shard: runs of nearly equal length."""
    return range(shard * chunks // shards, (shard + 1) * chunks // shards)


def shard_chunks(roster: Roster, shard: int, chunks: int) -> range:
    """The chunks of a roster's shard."""
    return shard_range(roster.shards, shard, chunks)
