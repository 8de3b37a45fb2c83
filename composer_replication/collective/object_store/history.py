"""What the store says about rounds that are behind us: where the fleet stands, and the chain that led there.

Invariant: read-only; the answer is a function of pointers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from composer_replication.collective.object_store import keys
from composer_replication.collective.object_store.pointers import Roster, parse_ready, parse_roster
from composer_replication.collective.object_store.roster import Plan
from composer_replication.collective.object_store.wire import MAX_POINTER_BYTES, load, pointer_hash
from composer_replication.errors import FleetMismatch, ObjectMissing
from composer_replication.store.base import ObjectStore

__all__ = [
    "Decided",
    "Standing",
    "can_follow",
    "closed_roster",
    "decided",
    "declared_base",
    "has_left",
    "is_void",
    "plan_at",
    "stand",
]


@dataclass(frozen=True, slots=True)
class Decided:
    roster: Roster
    hash: str


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the fleet stands, seen from a round."""

    tip: int  # the first round without a roster that holds
    attempts: Mapping[int, int]  # round -> the attempt to enter it at


def decided(store: ObjectStore, run: str, round: int, attempt: int) -> Decided | None:
    key = keys.roster(round, attempt)
    try:
        data = store.get(key, max_bytes=MAX_POINTER_BYTES)
    except ObjectMissing:
        return None
    return Decided(parse_roster(data, key, run=run, round=round, attempt=attempt), pointer_hash(data))


def stand(store: ObjectStore, run: str, start: int, *, strict: bool) -> Standing:
    """Follow the rosters from round `start` on. Aborted attempts are passed over, and under strict void ones too.

    (Otherwise a round is entered at the void attempt, so that its culprit is known in the next one.)
    """
    attempts: dict[int, int] = {}
    round = start
    while True:
        attempt, holds, enter = 0, None, 0
        while (found := decided(store, run, round, attempt)) is not None:
            if found.roster.kind == "sealed":
                raise FleetMismatch(
                    f"the run in {store.uri} is sealed at round {round} ({found.roster.reason}), and the epoch that "
                    "was to go on from there hasn't begun: resume it again (composer-replication launch --resume)"
                )
            void = found.roster.kind == "roster" and is_void(store, found.roster)
            if found.roster.kind == "roster" and not void:
                holds = found
                break
            attempt += 1
            if strict or not void:
                enter = attempt
        attempts[round] = enter
        if holds is None:
            return Standing(round, attempts)
        round += 1


def closed_roster(store: ObjectStore, run: str, round: int) -> Decided | None:
    """The roster that holds for a round behind us: that of its last attempt."""
    last, attempt = None, 0
    while (found := decided(store, run, round, attempt)) is not None:
        last = found if found.roster.kind == "roster" else last
        attempt += 1
    return last


def plan_at(store: ObjectStore, run: str, round: int, base: str, fleet: tuple[int, ...], *, first: int = 0) -> Plan:
    """What a replica knows that enters a round in state `base`: from the roster of the round before. The `first` round
    of an epoch needs the whole `fleet`."""
    if round == 0:
        return Plan(run=run, round=0, prev=run, base=base, expected=fleet)
    last = closed_roster(store, run, round - 1)
    if last is None:
        raise FleetMismatch(f"round {round - 1} isn't closed in {store.uri}")
    return Plan(
        run=run,
        round=round,
        prev=last.hash,
        base=base,
        expected=last.roster.expected_next if round != first else fleet,
        misses=last.roster.misses if round != first else {},
    )


def has_left(store: ObjectStore, run: str, round: int, replica: int) -> bool:
    """Was the last round before `round` that this replica took part in its last one, by its own word?"""
    for earlier in range(round - 1, -1, -1):
        found = closed_roster(store, run, earlier)
        if found is not None and replica in found.roster.present:
            reports = (*found.roster.members, *found.roster.others)
            return any(report.replica == replica and report.leaving for report in reports)
    return False


def can_follow(store: ObjectStore, run: str, round: int) -> bool:
    """Is what a replica needs to apply this closed round in the store? (No blob is read, so damage isn't seen.)"""
    found = closed_roster(store, run, round)
    if found is None:
        return False
    if not found.roster.members:
        return True
    writers, means = set[int](), False
    for key in store.list(keys.round_prefix(round)):
        attempt, kind, *name = key.split("/")[2:]
        if kind == "in":
            writers.add(int(name[0].partition(".")[0]))
        means = means or (kind == "out" and attempt == str(found.roster.attempt))
    return means or {report.replica for report in found.roster.members} <= writers


def is_void(store: ObjectStore, roster: Roster) -> bool:
    """Was one of a roster's shards found to have no mean?"""
    for shard in range(roster.shards):
        key = keys.mean(roster.round, roster.attempt, shard)
        try:
            if load(store.get(key, max_bytes=MAX_POINTER_BYTES), key).get("void"):
                return True
        except ObjectMissing:
            continue
    return False


def declared_base(store: ObjectStore, run: str, round: int, attempt: int, replica: int) -> str | None:
    """The state from which a replica says that it began a round."""
    key = keys.ready(round, attempt, replica)
    try:
        data = store.get(key, max_bytes=MAX_POINTER_BYTES)
    except ObjectMissing:
        return None
    ready = parse_ready(data, key, run=run, round=round, attempt=attempt, replica=replica)
    return ready.report.base if ready.report is not None else None
