"""`launch --resume`: what must be done before a whole fleet is started again.

Invariant: a run goes on where it stands as long as every replica can get there; only where that can't be, or the fleet
is to be of another size, does a new epoch begin, and then from the last state that the store can still give.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from composer_replication.adapter.files import latest_checkpoint
from composer_replication.collective.object_store.epochs import current
from composer_replication.collective.object_store.sealing import (
    Reach,
    begin_epoch,
    can_go_on_from,
    reach,
    refuse_if_trained,
)
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
    own = {replica: round for replica in _folders(folder) if (round := _own_round(folder, replica)) is not None}
    # Whoever began this epoch may have been stopped before this. (In the first one they are another run's.)
    later = [replica for replica, round in own.items() if number and round > tip]
    behind = [
        replica for replica, round in own.items() if replica < replicas and not can_go_on_from(store, found, round)
    ]
    if (later or behind) and number == found.epoch:
        refuse_if_trained(current(store), found)
    if later:
        count = sum(
            _set_aside(folder, replica, f"before-epoch-{number}", lambda round: round > tip) for replica in later
        )
        what = f"{count} checkpoints of later rounds" if count > 1 else "a checkpoint of a later round"
        words.append(f"{what}, which the store can't give any more, {'are' if count > 1 else 'is'} set aside")
    for replica in behind:
        _set_aside(folder, replica, f"behind-round-{found.checkpoint}", lambda round: round < found.checkpoint)
    if behind:
        words.append(
            f"replica {', '.join(map(str, behind))} begins at the store's newest checkpoint: the rounds since its own "
            f"are gone (which is set aside, in behind-round-{found.checkpoint})"
        )
    return "; ".join(words)


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


def _folders(folder: Path) -> list[int]:
    """All replicas that have one, also those that take no part now: a later fleet may be larger again."""
    found = (re.fullmatch(r"replica-(\d+)", path.name) for path in folder.glob("replica-*"))
    return sorted(int(match[1]) for match in found if match)


def _set_aside(folder: Path, replica: int, place: str, unusable: Callable[[int], bool]) -> int:
    """Move those of a replica's own newest checkpoints away whose rounds are `unusable`; gives how many."""
    count = 0
    while (path := _own_checkpoint(folder, replica)) is not None and unusable(_round_of(path)):
        aside = path.parent / place
        aside.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # another launcher does the same
            path.rename(aside / path.name)
        count += 1
    return count
