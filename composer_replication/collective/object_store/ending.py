"""How a run ends: the last checkpoint and `final.json`, once all of its last round have recorded the same digest.

Invariant: both are written for a unanimous end only, by whoever comes last; final.json is the very last object.
"""

from __future__ import annotations

from collections.abc import Callable

from composer_replication.collective.object_store import checkpoints, keys
from composer_replication.collective.object_store.pointers import Roster
from composer_replication.collective.object_store.requests import create
from composer_replication.collective.object_store.wire import MAX_POINTER_BYTES, dump, load
from composer_replication.errors import ObjectCorrupt, ObjectMissing
from composer_replication.store.base import ObjectStore

__all__ = ["close_run"]


def close_run(store: ObjectStore, last: Roster, digest: str, trace: Callable[[str], None]) -> None:
    """Write the last checkpoint and final.json if everyone of the last round has ended with `digest`."""
    replicas = sorted(last.present)
    if any(_ended_with(store, replica) != digest for replica in replicas):
        return  # someone is still on the way, or ended elsewhere
    content = {"run": last.run, "rounds": last.round + 1, "digest": digest, "replicas": replicas}
    checkpoints.commit_draft(store, last.round + 1, digest, trace)
    trace("before:final")
    create(store, keys.FINAL, dump(content))
    trace("after:final")


def _ended_with(store: ObjectStore, replica: int) -> str | None:
    key = keys.result(replica)
    try:
        return str(load(store.get(key, max_bytes=MAX_POINTER_BYTES), key).get("digest"))
    except (ObjectMissing, ObjectCorrupt):
        return None  # on the way still, or nobody can tell: the run stays open, and each replica has its weights
