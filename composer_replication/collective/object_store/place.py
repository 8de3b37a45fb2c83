"""Where a run lies: in one store, or with its pointers in a second one; and whether its objects are signed.

Invariant: whoever opens the same run by the same names finds the same objects.
"""

from __future__ import annotations

import os

from composer_replication.collective.object_store import keys
from composer_replication.collective.object_store.wire import MAX_POINTER_BYTES, load
from composer_replication.errors import FleetMismatch, ObjectCorrupt, ObjectMissing, SignatureError
from composer_replication.store import ObjectStore, PrefixedStore, SignedStore, SigningKey, SplitStore, open_store
from composer_replication.store.signed import is_signed
from composer_replication.store.signing_key import find_signing_key

__all__ = ["check_signing", "open_run"]


def open_run(
    store: ObjectStore | str,
    *,
    control: ObjectStore | str | None = None,
    run: str = "",
    create: bool = True,
    signing_key: SigningKey | str | os.PathLike[str] | None = None,
) -> ObjectStore:
    """The objects of `run` below `store` (a URI or an open store).

    `control` is a second store, for all but the blobs: for a first one that can't create an object only once, or makes
    each write slow. `signing_key` is a key, or the file that holds it; None: that of the environment, if there is one.
    Raises ValueError, StoreError.
    """
    key = find_signing_key(signing_key)
    if control is None:
        place = _below(store, run, create)
    elif isinstance(store, str) and store == control:
        raise ValueError(f"control is the store itself ({store}): leave it out")
    else:
        place = SplitStore(_below(store, run, create), _below(control, run, create), keys.is_blob)
    if key is None:
        return place
    # Claims and heartbeats come before fleet.json.
    early = (keys.CLAIMS, keys.MEMBERS)
    return SignedStore(place, key, anchor=keys.FLEET, early=early, max_anchor_bytes=MAX_POINTER_BYTES)


def check_signing(store: ObjectStore) -> None:
    """Raise FleetMismatch if the run that lies here is signed otherwise than this process signs: before it writes."""
    try:
        data = store.get(keys.FLEET, max_bytes=MAX_POINTER_BYTES)
        if is_signed(data):  # seen as it lies, so without a key
            load(data, keys.FLEET)
    except ObjectMissing:
        return
    except SignatureError as error:
        raise FleetMismatch(f"this process can't be part of the run in {store.uri}: {error}") from error
    except ObjectCorrupt:
        return  # too big: whoever reads it for what it says will tell


def _below(store: ObjectStore | str, run: str, create: bool) -> ObjectStore:
    whole = open_store(store, create=create) if isinstance(store, str) else store
    return PrefixedStore(whole, run) if run else whole
