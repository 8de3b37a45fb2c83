"""Where a run lies: in one store, or with its pointers in a second one.

Invariant: whoever opens the same run by the same names finds the same objects.
"""

from __future__ import annotations

from composer_replication.collective.object_store import keys
from composer_replication.store import ObjectStore, PrefixedStore, SplitStore, open_store

__all__ = ["open_run"]


def open_run(
    store: ObjectStore | str, *, control: ObjectStore | str | None = None, run: str = "", create: bool = True
) -> ObjectStore:
    """The objects of `run` below `store` (a URI or an open store).

    `control` is a second store, for all but the blobs: for a first one that can't create an object only once, or makes
    each write slow. Raises ValueError, StoreError.
    """
    if control is None:
        return _below(store, run, create)
    if isinstance(store, str) and store == control:
        raise ValueError(f"control is the store itself ({store}): leave it out")
    return SplitStore(_below(store, run, create), _below(control, run, create), keys.is_blob)


def _below(store: ObjectStore | str, run: str, create: bool) -> ObjectStore:
    whole = open_store(store, create=create) if isinstance(store, str) else store
    return PrefixedStore(whole, run) if run else whole
