"""What most stores can tell beyond the bytes: how big objects are, and what time it is there. For people and tools.

Invariant: no round depends on any of this; a store that can't tell is as good as one that can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from composer_replication.store.base import ObjectStore

__all__ = ["modified_seconds", "sizes"]


def sizes(store: ObjectStore, prefix: str) -> dict[str, int | None]:
    """All keys that begin with `prefix`, in order, with their sizes in bytes; None: the store doesn't tell."""
    ask = cast("Callable[[str], Mapping[str, int | None]] | None", getattr(store, "sizes", None))
    found = ask(prefix) if ask is not None else dict.fromkeys(store.list(prefix))
    return dict(sorted(found.items()))


def modified_seconds(store: ObjectStore, key: str) -> float | None:
    """When an object was written by the store's own clock, in seconds since 1970; None: it doesn't tell."""
    ask = cast("Callable[[str], float | None] | None", getattr(store, "modified_seconds", None))
    return ask(key) if ask is not None else None
