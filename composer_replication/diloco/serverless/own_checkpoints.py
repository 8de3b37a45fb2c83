"""A replica's own checkpoints in a run's folder, and those that its run can't go on from any more.

Invariant: none is deleted. One that is set aside lies beside the others, in a folder whose name says why.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from composer_replication.adapter.files import latest_checkpoint
from composer_replication.collective.object_store.sealing import can_go_on_from, reach
from composer_replication.errors import ReplicationError
from composer_replication.store import ObjectStore

__all__ = ["behind", "newest_round", "set_aside", "set_aside_behind"]


def newest_round(checkpoints: Path, replica: int) -> int | None:
    """The round of a replica's newest own checkpoint."""
    path = latest_checkpoint(checkpoints, replica)
    return None if path is None else _round_of(Path(path))


def _round_of(path: Path) -> int:
    found = re.search(r"round-(\d+)", path.name)
    assert found is not None, "latest_checkpoint gives names with a round"
    return int(found[1])


def set_aside(checkpoints: Path, replica: int, place: str, unusable: Callable[[int], bool]) -> int:
    """Move those of a replica's newest own checkpoints away whose rounds are `unusable`; gives how many."""
    count = 0
    while (name := latest_checkpoint(checkpoints, replica)) is not None and unusable(_round_of(path := Path(name))):
        aside = path.parent / place
        aside.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # another launcher does the same
            path.rename(aside / path.name)
        count += 1
    return count


def behind(checkpoint: int) -> str:
    """The place of those from which nothing leads on to the fleet's checkpoint of that round."""
    return f"behind-round-{checkpoint}"


def set_aside_behind(store: ObjectStore, checkpoints: Path, replica: int) -> str:
    """Set a replica's own checkpoints aside if the rounds since are gone: it was away for long, and the fleet went on.

    Says in a sentence what was done, if anything. What else may be wrong is told when the replica starts.
    """
    round = newest_round(checkpoints, replica)
    if round is None:
        return ""
    try:
        found = reach(store)
        if found is None or can_go_on_from(store, found, round):
            return ""
    except ReplicationError:
        return ""
    place = behind(found.checkpoint)
    set_aside(checkpoints, replica, place, lambda own: own < found.checkpoint)
    return (
        f"its own checkpoint is of round {round}, and the rounds from there to the fleet's checkpoint of round "
        f"{found.checkpoint} are gone: it is set aside ({place}), and the replica joins from the fleet's"
    )
