"""`launch --resume`: what must be done before a whole fleet is started again.

Invariant: a run goes on where it stands as long as every replica can get there; only where that can't be, or the fleet
is to be of another size, does a new epoch begin, and then from the last state that the store can still give.
"""

from __future__ import annotations

import re
from pathlib import Path

from composer_replication.adapter.files import latest_checkpoint
from composer_replication.collective.object_store.sealing import Reach, begin_epoch, reach
from composer_replication.diloco.serverless.replica import CHECKPOINTS
from composer_replication.errors import ObjectCorrupt
from composer_replication.store import ObjectStore

__all__ = ["begins_epoch", "prepare_resume"]


def begins_epoch(store: ObjectStore, folder: Path, replicas: int) -> bool:
    """Whether `prepare_resume` will begin a new epoch. Reads only."""
    try:
        found = reach(store)
    except ObjectCorrupt:
        return False  # or it can't be resumed at all, which `prepare_resume` says
    rounds = [_own_round(folder, replica) for replica in range(replicas)]
    return found is not None and not found.finished and _new_epoch(found, replicas, rounds)


def prepare_resume(store: ObjectStore, folder: Path, replicas: int) -> str:
    """Make the run in `store` ready for `replicas` replicas whose own checkpoints are in `folder`; says in a sentence
    what was done, if anything. Raises ReplicationError if it can't be resumed."""
    rounds = [_own_round(folder, replica) for replica in range(replicas)]
    try:
        found = reach(store)
    except ObjectCorrupt:
        if all(round is not None for round in rounds):
            return ""  # nobody needs the store's checkpoints
        raise
    if found is None or found.finished or not _new_epoch(found, replicas, rounds):
        return ""
    epoch = begin_epoch(store, replicas)
    aside = sum(_set_aside(folder, replica, epoch.first, epoch.number) for replica in range(replicas))
    fleet = f"{replicas} replicas" + (f" instead of {found.replicas}" if replicas != found.replicas else "")
    return f"resumed from round {epoch.first} as epoch {epoch.number}: {fleet}" + (
        f"; {aside} checkpoints of later rounds, which the store can't give any more, are set aside" if aside else ""
    )


def _new_epoch(found: Reach, replicas: int, rounds: list[int | None]) -> bool:
    if replicas != found.replicas or found.sealed:
        return True
    stuck = found.followed < found.open[0]  # at a closed round whose contents are gone
    return stuck and any(round is None or round <= found.followed for round in rounds)


def _own_checkpoint(folder: Path, replica: int) -> Path | None:
    path = latest_checkpoint(folder / f"replica-{replica}" / CHECKPOINTS, replica)
    return None if path is None else Path(path)


def _own_round(folder: Path, replica: int) -> int | None:
    path = _own_checkpoint(folder, replica)
    return None if path is None else _round_of(path)


def _round_of(path: Path) -> int:
    found = re.search(r"round-(\d+)", path.name)
    assert found is not None, "latest_checkpoint gives names with a round"
    return int(found[1])


def _set_aside(folder: Path, replica: int, first: int, epoch: int) -> int:
    """Move a replica's own checkpoints of states that the run doesn't go on from; gives how many."""
    count = 0
    while (path := _own_checkpoint(folder, replica)) is not None and _round_of(path) > first:
        place = path.parent / f"before-epoch-{epoch}"
        place.mkdir(exist_ok=True)
        path.rename(place / path.name)
        count += 1
    return count
