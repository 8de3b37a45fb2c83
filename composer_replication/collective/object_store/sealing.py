"""Beginning a new epoch of a run: by whoever resumes a whole fleet, when nobody of the old one lives.

Invariant: the old epoch is sealed first, so that whoever wakes up in it stops; where the new one begins is written
once, and is a state that the fleet has been in and that the store can still give. Doing it again, after any
interruption, comes to the same end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from composer_replication.collective.object_store import checkpoints, keys
from composer_replication.collective.object_store.entrants import Entrants
from composer_replication.collective.object_store.epochs import Epoch, EpochStore, current, dump_epoch, read_epochs
from composer_replication.collective.object_store.fleet import live_replicas
from composer_replication.collective.object_store.history import can_follow, closed_roster, decided, is_void
from composer_replication.collective.object_store.pointers import Roster, dump_roster
from composer_replication.collective.object_store.requests import create, there
from composer_replication.collective.object_store.wire import MAX_POINTER_BYTES, load
from composer_replication.errors import FleetMismatch, ObjectCorrupt, ObjectMissing, ReplicaTaken
from composer_replication.store.base import ObjectStore

__all__ = ["Reach", "begin_epoch", "can_go_on_from", "reach", "refuse_if_trained"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How far the rounds of a run can be followed with what is in its store."""

    run: str
    epoch: int  # the present one
    replicas: int  # that it began with
    newest: int  # the newest checkpoint
    checkpoint: int  # the newest one that is whole
    followed: int  # the round that a replica gets to that starts from there
    open: tuple[int, int]  # round and attempt of the next roster
    sealed: bool  # by an earlier attempt to begin an epoch
    finished: bool


def reach(store: ObjectStore) -> Reach | None:
    """Of the present epoch of the run that lies in `store`; None where there is no run, or one that was stopped before
    its first weights were there. Raises ObjectCorrupt if no checkpoint is whole."""
    return _reach(store, read_epochs(store))


def can_go_on_from(store: ObjectStore, found: Reach, round: int) -> bool:
    """Is all there that leads from the start of `round` to the newest whole checkpoint?"""
    view = current(store)
    return all(can_follow(view, found.run, passed) for passed in range(round, found.checkpoint))


def refuse_if_trained(
    view: ObjectStore,
    found: Reach,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Raise ReplicaTaken while a replica of the run's present epoch, of which `view` is a view, lives."""
    ids = Entrants(view, found.run, found.replicas).look()
    if alive := live_replicas(view, ids, clock=clock, pause=sleep):
        raise ReplicaTaken(
            f"the run in {view.uri} is being trained: {'; '.join(alive)}. Stop these processes before the run is "
            "resumed"
        )


def _view(store: ObjectStore, epochs: Sequence[Epoch]) -> ObjectStore:
    return EpochStore(store, epochs) if epochs else store


def _reach(store: ObjectStore, epochs: Sequence[Epoch]) -> Reach | None:
    view = _view(store, epochs)
    try:
        fleet = load(store.get(keys.FLEET, max_bytes=MAX_POINTER_BYTES), keys.FLEET)
    except ObjectMissing:
        return None
    run = str(fleet.get("nonce", ""))
    replicas = epochs[-1].replicas if epochs else int(fleet.get("replicas", 0))
    listed = checkpoints.rounds(view)
    if not listed:
        if not there(view, keys.manifest(0)):
            return None
        listed = [0]  # the listing is behind
    newest = next((round for round in listed if checkpoints.is_whole(view, round)), None)
    if newest is None:
        raise ObjectCorrupt(f"{store.uri} has no checkpoint that is whole: begin another run in another place")
    round, attempt, sealed = _next_roster(view, run, newest)
    followed = newest
    while followed < round and can_follow(view, run, followed):
        followed += 1
    last = closed_roster(view, run, round - 1) if round else None
    return Reach(
        run=run,
        epoch=len(epochs),
        replicas=replicas,
        newest=listed[0],
        checkpoint=newest,
        followed=followed,
        open=(round, attempt),
        sealed=sealed,
        finished=last is not None and not last.roster.expected_next,
    )


def begin_epoch(
    store: ObjectStore,
    replicas: int,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Epoch:
    """Seal the present epoch of the run in `store`, and begin the next one with `replicas` replicas.

    It begins with the last state that can be had from the store; what had been averaged beyond is dropped. Start the
    replicas afterwards. Raises ReplicaTaken while a replica of the present epoch lives; FleetMismatch if there is no
    run, or it has finished, or another one has begun an epoch of another size meanwhile; ObjectCorrupt if not even the
    newest checkpoint's state can be had.
    """
    if replicas < 1:
        raise ValueError(f"replicas must be at least 1, got {replicas}")
    epochs = read_epochs(store)
    view = _view(store, epochs)
    found = _reach(store, epochs)
    if found is None:
        raise FleetMismatch(
            f"{store.uri} holds no run that could be resumed with another fleet (no {keys.FLEET}, or no first weights "
            "yet): start it as it was begun, or begin another run in another place"
        )
    if found.finished:
        raise _finished(store)
    if found.followed < found.newest:
        raise ObjectCorrupt(
            f"the newest checkpoint (round {found.newest} of {store.uri}) isn't whole, and the rounds that led there "
            f"from the one of round {found.checkpoint} are gone: resume with the same number of replicas and their own "
            "checkpoints, or begin another run in another place"
        )
    refuse_if_trained(view, found, clock=clock, sleep=sleep)
    while not found.sealed:
        _seal(view, found.run, found.open)
        again = _reach(store, epochs)  # a roster may have been faster; and what was averaged meanwhile counts
        assert again is not None, "fleet.json stays"
        found = again
        if found.finished:
            raise _finished(store)
    epoch = Epoch(number=len(epochs) + 1, run=found.run, first=found.followed, replicas=replicas, sealed=found.open)
    create(store, keys.epoch(epoch.number), dump_epoch(epoch))
    there_now = read_epochs(store)[len(epochs)]
    if there_now.replicas != replicas:
        raise FleetMismatch(
            f"the run in {store.uri} is being resumed with {there_now.replicas} replicas, not with {replicas}: "
            "start them with that number, or stop them and try again"
        )
    return there_now


def _finished(store: ObjectStore) -> FleetMismatch:
    return FleetMismatch(f"the run in {store.uri} has finished: there is nothing to resume")


def _next_roster(store: ObjectStore, run: str, start: int) -> tuple[int, int, bool]:
    """(round, attempt, sealed): where the next roster has to be, or where the epoch is sealed."""
    round = start
    while True:
        attempt = 0
        while (found := decided(store, run, round, attempt)) is not None:
            if found.roster.kind == "sealed":
                return round, attempt, True
            if found.roster.kind == "roster" and not is_void(store, found.roster):
                break
            attempt += 1
        if found is None:
            return round, attempt, False
        round += 1


def _seal(store: ObjectStore, run: str, place: tuple[int, int]) -> None:
    round, attempt = place
    blank = Roster(run=run, round=round, attempt=attempt, writer=(0, 0), kind="sealed")
    create(
        store, keys.roster(round, attempt), dump_roster(replace(blank, reason="the run was resumed by another fleet"))
    )
