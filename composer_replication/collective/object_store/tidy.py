"""What of a run may be deleted by hand, and what must stay: the collection's rules, from the pointers alone.

Invariant: reads only. No pointer is ever named, nothing outside the run's own prefix, and of a run that isn't finished
no blob that a live replica, one that comes back, or a newcomer could ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from composer_replication.collective.object_store import checkpoints, keys
from composer_replication.collective.object_store.epochs import read_fleet
from composer_replication.collective.object_store.garbage import KEEP_ROUNDS
from composer_replication.collective.object_store.history import closed_roster, stand
from composer_replication.collective.object_store.requests import there
from composer_replication.collective.object_store.wire import MAX_POINTER_BYTES, load
from composer_replication.errors import ObjectCorrupt, ObjectMissing, ReplicationError, StoreError
from composer_replication.store import details
from composer_replication.store.base import ObjectStore

__all__ = ["SCRATCH", "Tidy", "applied_by_all", "plan_tidy"]

SCRATCH = "doctor-"  # what a probe of the store leaves that was killed


@dataclass(frozen=True, kw_only=True)
class Tidy:
    """A run's blobs, told apart. Sizes in bytes; None: the store doesn't tell."""

    run: str
    finished: bool
    rounds: int  # closed
    checkpoint: int | None  # round of the newest
    floor: int  # blobs of rounds before it may go
    keep_checkpoints_from: int  # contents of older ones may go
    doomed: Mapping[str, Mapping[str, int | None]] = field(default_factory=dict[str, Mapping[str, int | None]])
    kept: Mapping[str, int | None] = field(default_factory=dict[str, "int | None"])

    @property
    def keys(self) -> list[str]:
        return [key for group in self.doomed.values() for key in group]


def plan_tidy(store: ObjectStore, *, before: int | None = None, only_final: bool = False) -> Tidy:
    """What may go now. `before` asks for the blobs of rounds before that one only; `only_final` leaves of a finished
    run what its last weights need.

    Raises ReplicationError when more is asked for than is safe, StoreError when there is no run.
    """
    fleet, _ = read_fleet(store)
    if fleet is None:
        raise StoreError(
            f"there is no run in {store.uri} (no {keys.FLEET}), so nothing there is known to be unneeded: give one "
            "run's own prefix, and its second store if it has one (--control)"
        )
    run, strict = str(fleet.get("nonce", "")), fleet.get("failure_policy") == "strict"
    finished = there(store, keys.FINAL)
    known = checkpoints.rounds(store)
    newest = known[0] if known else None
    tip = stand(store, run, newest or 0, strict=strict).tip
    floor = min(newest or 0, tip) if finished else min(newest or 0, applied_by_all(store, run, tip)) - KEEP_ROUNDS
    if before is not None:
        if before > floor:
            raise ReplicationError(_unsafe(store, before, max(floor, 0), finished))
        floor = before
    keep_from = known[1] if len(known) > 1 else 0
    if only_final:
        if not finished:
            raise ReplicationError(
                f"the run in {store.uri} isn't finished (no {keys.FINAL}): all but its final checkpoint can go only "
                "when all replicas of its last round have ended with the same weights"
            )
        if newest is None or not _whole(store, newest):
            raise ReplicationError(f"the newest checkpoint in {store.uri} isn't whole: the older ones stay")
        keep_from = newest
    rounds, contents = details.sizes(store, "rounds/"), details.sizes(store, keys.CHECKPOINTS)
    scratch = details.sizes(store, SCRATCH)
    groups: dict[str, dict[str, int | None]] = {
        f"contributions to rounds before {max(floor, 0)}": _of_rounds(rounds, "in", floor),
        f"means of rounds before {max(floor, 0)}": _of_rounds(rounds, "out", floor),
        f"contents of checkpoints before round {keep_from}": {
            key: size for key, size in contents.items() if keys.is_blob(key) and int(key.split("/")[1]) < keep_from
        },
        "left by a probe of the store": scratch,
    }
    doomed = {name: group for name, group in groups.items() if group}
    gone = {key for group in doomed.values() for key in group}
    return Tidy(
        run=run,
        finished=finished,
        rounds=tip,
        checkpoint=newest,
        floor=max(floor, 0),
        keep_checkpoints_from=keep_from,
        doomed=doomed,
        kept={key: size for key, size in (rounds | contents).items() if key not in gone},
    )


def _of_rounds(found: Mapping[str, int | None], kind: str, floor: int) -> dict[str, int | None]:
    chosen: dict[str, int | None] = {}
    for key, size in found.items():
        place = keys.round_of(key)
        if place is not None and place[0] < floor and keys.is_blob(key) and key.split("/")[3] == kind:
            chosen[key] = size
    return chosen


def applied_by_all(store: ObjectStore, run: str, tip: int) -> int:
    """The round before which all expected replicas have applied everything: each took part in it or a later one."""
    last = closed_roster(store, run, tip - 1) if tip else None
    if last is None:
        return 0
    waiting, applied = set(last.roster.expected_next), tip
    for round in range(tip - 1, -1, -1):
        found = last if round == tip - 1 else closed_roster(store, run, round)
        here = waiting & found.roster.present if found is not None else set[int]()
        if here:
            applied, waiting = round, waiting - here
        if not waiting:
            return applied
    return 0


def _whole(store: ObjectStore, round: int) -> bool:
    """Are all contents of a checkpoint there, with the sizes that its manifest names? (No hash is computed.)"""
    key = keys.manifest(round)
    sizes = details.sizes(store, keys.checkpoint(round))
    try:
        content = load(store.get(key, max_bytes=MAX_POINTER_BYTES), key)
        facts = [(str(digest), int(size)) for what in ("anchor", "momentum") for digest, size in content[what]]
    except (ObjectMissing, ObjectCorrupt, KeyError, TypeError, ValueError):
        return False
    for digest, size in facts:
        blob = keys.checkpoint_blob(round, digest)
        held = sizes.get(blob, -1)
        if held is not None and held < size:  # a signed one is a little longer
            return False
    return True


def _unsafe(store: ObjectStore, before: int, floor: int, finished: bool) -> str:
    why = (
        "its last weights are in its newest checkpoint and the rounds since"
        if finished
        else "a replica that comes back, or a newcomer, may still need the rounds from there on (the newest "
        f"checkpoint, and what all expected replicas have applied, less {KEEP_ROUNDS} rounds)"
    )
    return f"--before {before} is beyond what is safe in {store.uri}, which is {floor}: {why}"
