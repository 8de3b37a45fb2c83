"""Where a replica begins: in which epoch; at the first weights, at the fleet's newest checkpoint, or at its own.

Invariant: nobody trains from a state that the fleet hasn't been in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from composer_replication.collective.base import Snapshot
from composer_replication.collective.object_store import checkpoints, keys
from composer_replication.collective.object_store.epochs import Epoch, EpochStore, read_epochs
from composer_replication.collective.object_store.history import (
    Standing,
    can_follow,
    closed_roster,
    decided,
    declared_base,
    has_left,
    plan_at,
    stand,
)
from composer_replication.collective.object_store.pointers import Roster
from composer_replication.collective.object_store.requests import there
from composer_replication.collective.object_store.roster import Plan, Policy
from composer_replication.collective.object_store.wire import MAX_POINTER_BYTES, load
from composer_replication.errors import FleetMismatch, ObjectCorrupt, ObjectMissing, StoreError
from composer_replication.store.base import ObjectStore

__all__ = ["Standpoint", "check_known", "enter_epoch", "first_state", "fleet_sizes", "standpoint"]

MAX_READS = 3  # of checkpoints, each of which was passed by while it was read


def first_state(
    store: ObjectStore,
    run: str,
    offered: Snapshot,
    *,
    replica: int,
    lowest: int,
    wait: Callable[[], None],
    trace: Callable[[str], None],
) -> Snapshot:
    """The fleet's newest checkpoint: of a run that is over, its last state. The lowest id writes the first one; the
    others `wait` for it. One that took so long to read that the rounds since are gone is left for the next newest;
    after the third, StoreError."""
    if offered.round != 0:
        raise ValueError(f"a fresh start offers round 0, got {offered.round}")
    overtaken: list[int] = []  # checkpoints, while they were read
    while True:
        if len(overtaken) == MAX_READS:
            raise StoreError(
                f"replica {replica} has read {MAX_READS} checkpoints of {store.uri} (rounds "
                f"{', '.join(map(str, overtaken))}), and each time the fleet had written a newer one and deleted the "
                "rounds between them before the reading was done: checkpoint_every is too short for this link; begin "
                "the run with a larger one, or give this replica a faster link to the store"
            )
        newest = checkpoints.latest_round(store)
        if newest is None and there(store, keys.manifest(0)):  # a listing may be behind
            newest = 0
        if newest is not None:
            try:
                found = checkpoints.read(store, run, newest)
                if not _passed_by(store, run, newest):
                    return found
                del found  # two of them may not fit into memory
                overtaken.append(newest)
                continue
            except (ObjectMissing, ObjectCorrupt) as error:
                if checkpoints.latest_round(store) not in (newest, None):
                    overtaken.append(newest)
                    continue  # it was collected while it was read: there is a newer one
                return _older_state(store, run, newest, error)
        if replica == lowest:
            checkpoints.commit(store, checkpoints.write_blobs(store, run, offered, trace), trace)
            newest = checkpoints.latest_round(store)
            if newest in (None, 0) and checkpoints.digest_of(store, 0) == offered.digest:
                return offered  # what was written just now needn't be read back, nor held twice
            continue
        wait()


def _passed_by(store: ObjectStore, run: str, round: int) -> bool:
    """Is there a newer checkpoint by now, and no way to it by the rounds between? (Without a newer one, nothing since
    has been collected.)"""
    newest = checkpoints.latest_round(store)
    return newest is not None and not all(can_follow(store, run, passed) for passed in range(round, newest))


def _older_state(store: ObjectStore, run: str, newest: int, error: StoreError) -> Snapshot:
    """The next older checkpoint that can be read, and from which the rounds up to the newest one are still there."""
    for round in checkpoints.rounds(store):
        if round >= newest:
            continue
        if not all(can_follow(store, run, passed) for passed in range(round, newest)):
            break
        try:
            return checkpoints.read(store, run, round)
        except (ObjectMissing, ObjectCorrupt):
            continue
    raise ObjectCorrupt(
        f"the newest checkpoint (round {newest} of {store.uri}) can't be used: {error}; and no older one "
        "whose rounds are all there still. Start this replica with a checkpoint of its own, or when the fleet has "
        "written its next one; if no replica has either, the run can't go on: begin another one under another prefix"
    ) from error


def check_known(store: ObjectStore, run: str, snapshot: Snapshot, *, strict: bool, fleet: tuple[int, ...]) -> Standing:
    """Has the fleet been in this state at this round? Gives where the fleet stands now; raises FleetMismatch."""
    round, known = snapshot.round, set[str]()
    if round > 0 and stand(store, run, round - 1, strict=strict).tip < round:
        raise FleetMismatch(
            f"this checkpoint is of round {round}, but round {round - 1} isn't closed in {store.uri}: it belongs to "
            "another run; give that run's prefix, or start without the checkpoint"
        )
    standing = stand(store, run, round, strict=strict)
    if there(store, keys.manifest(round)):
        known.add(checkpoints.digest_of(store, round))
    elif round == 0:
        raise FleetMismatch(f"{store.uri} has no first weights: start without the checkpoint")
    attempt = standing.attempts[round]
    here = decided(store, run, round, attempt)
    if here is not None and here.roster.kind == "roster":
        known.add(here.roster.base)
    elif not known:  # whoever is ahead has said from where it began this round
        declared = (declared_base(store, run, round, attempt, replica) for replica in fleet)
        known.update(base for base in declared if base is not None)
    if known and snapshot.digest not in known:
        raise FleetMismatch(
            f"this checkpoint's state of round {round} ({snapshot.digest}) isn't the fleet's "
            f"({', '.join(sorted(known))}) in {store.uri}: it belongs to another run, or is damaged; start without "
            "it to join from the fleet's newest checkpoint"
        )
    return standing


def enter_epoch(
    raw: ObjectStore, store: ObjectStore, *, replicas: int, nonce: str
) -> tuple[ObjectStore, ObjectStore, Epoch] | None:
    """The run as its epoch before the newest one, and as the newest one sees it; None where there is only one. `store`
    is `raw`, asked with patience. Raises FleetMismatch for a process that was started for another fleet."""
    epochs = read_epochs(store)
    if not epochs:
        return None
    epoch = epochs[-1]
    for name, here, there_ in (("nonce", nonce or epoch.run, epoch.run), ("replicas", replicas, epoch.replicas)):
        if here != there_:
            raise FleetMismatch(
                f"this process differs from its fleet (epoch {epoch.number} of the run in {store.uri}): {name}: "
                f"{here!r} here, {there_!r} in the fleet. Start it as the run was resumed last, or use another prefix"
            )
    view = EpochStore(raw, epochs)
    return view.before, view, epoch


def fleet_sizes(store: ObjectStore) -> dict[int, int]:
    """The first round of each epoch of the run in `store` -> how many replicas it began with. What a controller makes
    of a round depends on it, whenever the round is followed."""
    fleet = load(store.get(keys.FLEET, max_bytes=MAX_POINTER_BYTES), keys.FLEET)
    return {0: int(fleet["replicas"])} | {epoch.first: epoch.replicas for epoch in read_epochs(store)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Standpoint:
    """Where a replica begins its rounds, and where its fleet stands then."""

    plan: Plan
    last: Roster | None  # of the round before
    tip: int  # the first round that isn't closed
    attempts: Mapping[int, int]  # round -> the attempt to enter it at
    slow_round: int | None  # whose others may be starting still
    joined_at: int  # what an earlier life said before this round doesn't bind this one
    left: bool
    awaited: bool  # the coming round waits for this replica


def standpoint(
    store: ObjectStore,
    run: str,
    snapshot: Snapshot,
    *,
    policy: Policy,
    replica: int,
    ids: tuple[int, ...],
    resumed: bool,
) -> Standpoint:
    """Of a replica that begins with `snapshot`; `ids` are all replicas that have shown themselves. Raises FleetMismatch
    if the fleet hasn't been in that state."""
    standing = check_known(store, run, snapshot, strict=policy.strict, fleet=ids)
    round, first = snapshot.round, policy.first_round
    plan = plan_at(store, run, round, snapshot.digest, policy.fleet, first=first)
    before = closed_roster(store, run, round - 1) if round else None
    awaiting = policy.fleet if round <= first else plan.expected
    # Under skip, whoever comes without a checkpoint comes to take part, even if it has left before.
    bound = resumed or policy.strict
    return Standpoint(
        plan=plan,
        last=before.roster if before is not None else None,
        tip=standing.tip,
        attempts=standing.attempts,
        slow_round=max(round, first) if resumed or round <= first else None,
        joined_at=first if bound else standing.tip,
        left=bound and replica not in awaiting and has_left(store, run, round, replica),
        awaited=replica in awaiting,
    )
