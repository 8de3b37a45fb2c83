"""`launch --resume`: what must be done before a whole fleet is started again.

Invariant: a run goes on where it stands as long as every replica can get there; only where that can't be, or the fleet
is to be of another size, does a new epoch begin, and then from the last state that the store can still give.
"""

from __future__ import annotations

import re
from pathlib import Path

from composer_replication.collective.object_store.epochs import current
from composer_replication.collective.object_store.sealing import (
    Reach,
    begin_epoch,
    can_go_on_from,
    reach,
    refuse_if_trained,
)
from composer_replication.diloco.serverless.own_checkpoints import behind, newest_round, set_aside
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
    if found is None or found.finished:
        return ""
    words: list[str] = []
    number, tip = found.epoch, found.open[0]
    if _new_epoch(found, replicas, rounds):
        epoch = begin_epoch(store, replicas)
        number, tip = epoch.number, epoch.first
        fleet = f"{replicas} replicas" + (f" instead of {found.replicas}" if replicas != found.replicas else "")
        words.append(f"resumed from round {tip} as epoch {number}: {fleet}")
    else:
        refuse_if_trained(current(store), found)  # each replica would be refused, and its files be written over
    own = {replica: round for replica in _folders(folder) if (round := _own_round(folder, replica)) is not None}
    # Whoever began this epoch may have been stopped before this. (In the first one they are another run's.)
    later = [replica for replica, round in own.items() if number and round > tip]
    stale = [
        replica for replica, round in own.items() if replica < replicas and not can_go_on_from(store, found, round)
    ]
    if later:
        place = f"before-epoch-{number}"
        count = sum(set_aside(_own(folder, replica), replica, place, lambda round: round > tip) for replica in later)
        what = f"{count} checkpoints of later rounds" if count > 1 else "a checkpoint of a later round"
        words.append(f"{what}, which the store can't give any more, {'are' if count > 1 else 'is'} set aside")
    for replica in stale:
        set_aside(_own(folder, replica), replica, behind(found.checkpoint), lambda round: round < found.checkpoint)
    if stale:
        words.append(
            f"replica {', '.join(map(str, stale))} begins at the store's newest checkpoint: the rounds since its own "
            f"are gone (which is set aside, in {behind(found.checkpoint)})"
        )
    return "; ".join(words)


def _new_epoch(found: Reach, replicas: int, rounds: list[int | None]) -> bool:
    if replicas != found.replicas or found.sealed:
        return True
    stuck = found.followed < found.open[0]  # at a closed round whose contents are gone
    return stuck and any(round is None or round <= found.followed for round in rounds)


def _own(folder: Path, replica: int) -> Path:
    return folder / f"replica-{replica}" / CHECKPOINTS


def _own_round(folder: Path, replica: int) -> int | None:
    return newest_round(_own(folder, replica), replica)


def _folders(folder: Path) -> list[int]:
    """All replicas that have one, also those that take no part now: a later fleet may be larger again."""
    found = (re.fullmatch(r"replica-(\d+)", path.name) for path in folder.glob("replica-*"))
    return sorted(int(match[1]) for match in found if match)
