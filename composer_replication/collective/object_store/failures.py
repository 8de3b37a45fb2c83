"""How a round's failure is told: which error, what happened, and what to do."""

from __future__ import annotations

from composer_replication.collective.layout import Layout
from composer_replication.collective.object_store import keys
from composer_replication.collective.object_store.events import Fail
from composer_replication.collective.object_store.fleet import few
from composer_replication.collective.object_store.roster import OTHER_TENSORS
from composer_replication.collective.object_store.wire import MAX_POINTER_BYTES, load
from composer_replication.errors import (
    Diverged,
    Fenced,
    FleetMismatch,
    ObjectCorrupt,
    ReplicationError,
    RoundAborted,
    StoreError,
)
from composer_replication.store.base import ObjectStore

__all__ = ["round_error"]

_SAME_TENSORS = (
    "Freeze and unfreeze (requires_grad) the same tensors after the same round on every replica, by steps of the fleet "
    "and not by what one replica has seen; then restart this one"
)
_REJOIN = "restart it without its own checkpoint, and it joins from the fleet's newest one"


def round_error(fail: Fail, store: ObjectStore, round: int, replica: int, layout: Layout) -> ReplicationError:
    """The error for `fail`. An aborted round reads alike on every replica."""
    where, me, roster = f"round {round} of {store.uri}", f"replica {replica}", fail.roster
    match fail.kind:
        case "aborted":
            notes = [fail.reason]
            if roster is not None and roster.missing:
                notes.append("missing: replica " + ", ".join(str(missing) for missing in roster.missing))
            if roster is not None:
                notes += [f"replica {other}: {why}" for other, why in roster.differing.items()]
            if roster is not None and OTHER_TENSORS in roster.differing.values():
                notes.append(_SAME_TENSORS)
            return RoundAborted(f"{where} was aborted: {'; '.join(notes)}")
        case "diverged":
            return Diverged(f"{where}: {fail.reason}. {me} is not averaged; {_REJOIN}")
        case "behind":
            return Diverged(f"{where} has been passed by everyone ({fail.reason}). {me} is behind; {_REJOIN}")
        case "mismatch":
            differences = _tensor_differences(store, fail.reason, layout)
            return FleetMismatch(f"{where}: {me} trained other tensors than the fleet: {differences}. {_SAME_TENSORS}")
        case "sealed":
            return Fenced(
                f"{where} is sealed: {fail.reason}. {me} belongs to the fleet before it, and stops; it is not to be "
                "restarted as such"
            )
        case "corrupt":
            return ObjectCorrupt(f"{where}: {fail.reason}{_damaged_round(fail.reason, round)}")
        case "store":
            return StoreError(f"{where}: {fail.reason}; the store doesn't show what was written to it")


def _damaged_round(reason: str, round: int) -> str:
    """What to do where contents, not pointers, are damaged: each further start would come upon them again."""
    if "/in/" not in reason and "/out/" not in reason:
        return ""
    place = keys.round_prefix(round)
    return (
        ". Whoever has applied the round goes on from a checkpoint of its own. If nobody has one, stop all, delete "
        f"what lies in {place}*/in/ and {place}*/out/ (below epochs/, if the run was resumed with another fleet), and "
        "start the fleet with launch --resume: it goes on from the newest checkpoint"
    )


def _tensor_differences(store: ObjectStore, fingerprint: str, layout: Layout) -> str:
    key = keys.layout(fingerprint)
    try:
        theirs = Layout.from_json(load(store.get(key, max_bytes=MAX_POINTER_BYTES), key))
    except (StoreError, KeyError, TypeError, ValueError):
        return f"layout {layout.fingerprint} here, {fingerprint} there"
    return few(layout.differences(theirs), 3)
