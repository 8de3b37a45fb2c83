"""`gc`: what of a run nobody can need any more; deletes it when told to.

Invariant: deletes nothing without being told to, and nothing but what it has shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from composer_replication.cli.status import open_place
from composer_replication.collective.object_store.epochs import current
from composer_replication.collective.object_store.tidy import Tidy, plan_tidy
from composer_replication.readable import byte_count
from composer_replication.store import ObjectStore

__all__ = ["gc"]

_BATCH = 1000


def gc(
    uri: str,
    *,
    control: str | None,
    delete: bool,
    before: int | None,
    only_final: bool,
    listed: bool,
    as_json: bool,
    signing_key_file: str | None = None,
) -> int:
    store = current(open_place(uri, control=control, signing_key_file=signing_key_file))
    tidy = plan_tidy(store, before=before, only_final=only_final)
    if not as_json:
        _show(store, tidy, listed)
    if delete:
        _delete(store, tidy.keys, quiet=as_json)
    if as_json:
        print(json.dumps(_plain(store, tidy, delete, listed)))
    elif not tidy.keys:
        print("nothing may go")
    elif delete:
        print(f"deleted {len(tidy.keys)} objects ({_total(tidy)})")
    else:
        print(f"this was a dry run: nothing was deleted. --delete deletes {len(tidy.keys)} objects ({_total(tidy)})")
    return 0


def _show(store: ObjectStore, tidy: Tidy, listed: bool) -> None:
    state = "finished" if tidy.finished else "not finished"
    newest = "none" if tidy.checkpoint is None else f"of round {tidy.checkpoint}"
    print(f"{store.uri}: {tidy.rounds} rounds closed, {state}, newest checkpoint {newest}")
    rows = [(name, len(group), _bytes(group.values())) for name, group in tidy.doomed.items()]
    rows.append(("stays (pointers, and what may be needed)", len(tidy.kept), _bytes(tidy.kept.values())))
    for name, count, size in rows:
        print(f"  {name:<44} {count:>8} objects {size:>10}")
    if listed:
        for key in tidy.keys:
            print(key)


def _delete(store: ObjectStore, doomed: list[str], *, quiet: bool) -> None:
    for begin in range(0, len(doomed), _BATCH):
        store.delete(doomed[begin : begin + _BATCH])
        if not quiet and len(doomed) > _BATCH:
            print(f"  {min(begin + _BATCH, len(doomed))} of {len(doomed)} deleted", flush=True)


def _bytes(sizes: Iterable[int | None]) -> str:
    values = list(sizes)
    return "size not told" if None in values else byte_count(sum(size for size in values if size is not None))


def _total(tidy: Tidy) -> str:
    return _bytes(size for group in tidy.doomed.values() for size in group.values())


def _plain(store: ObjectStore, tidy: Tidy, deleted: bool, listed: bool) -> dict[str, object]:
    sizes = [size for group in tidy.doomed.values() for size in group.values()]
    return {
        "store": store.uri,
        "run": tidy.run,
        "finished": tidy.finished,
        "rounds": tidy.rounds,
        "checkpoint": tidy.checkpoint,
        "floor": tidy.floor,
        "deleted": deleted,
        "objects": len(sizes),
        "bytes": None if None in sizes else sum(size for size in sizes if size is not None),
        "groups": {name: len(group) for name, group in tidy.doomed.items()},
        **({"keys": tidy.keys} if listed else {}),
    }
