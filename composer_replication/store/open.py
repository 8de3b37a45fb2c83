"""From a URI to a store: a table of schemes, so that remote ones can be added without touching this file."""

from __future__ import annotations

import threading
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

from composer_replication.store.base import ObjectStore
from composer_replication.store.local import LocalStore
from composer_replication.store.memory import MemoryStore
from composer_replication.store.remote import RemoteStore, known_to_fsspec

__all__ = ["open_store", "register_scheme"]

Opener = Callable[[str, bool], ObjectStore]

_memory: dict[str, MemoryStore] = {}
_lock = threading.Lock()


def _open_file(uri: str, create: bool) -> ObjectStore:
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost"):
        raise ValueError(f"{uri!r}: a file URI has three slashes, file:///{parts.netloc}{parts.path}")
    if not parts.path.startswith("/") or parts.query or parts.fragment:
        raise ValueError(f"{uri!r}: a file URI is file:// and an absolute path, like file:///shared/run1")
    return LocalStore(unquote(parts.path), create=create)


def _open_memory(uri: str, create: bool) -> ObjectStore:
    name = uri.partition("://")[2]
    with _lock:
        return _memory.setdefault(name, MemoryStore(name))


def _open_remote(uri: str, create: bool) -> ObjectStore:
    # No request is made here: buckets aren't made for people, and the first operation says what is wrong.
    return RemoteStore(uri)


_REMOTE = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf")
_openers: dict[str, Opener] = {"file": _open_file, "memory": _open_memory, **dict.fromkeys(_REMOTE, _open_remote)}


def register_scheme(scheme: str, opener: Opener) -> None:
    """Make `open_store` understand `scheme://…`: `opener(uri, create)` gives the store."""
    _openers[scheme] = opener


def open_store(uri: str, *, create: bool = True) -> ObjectStore:
    """The store at `uri`: a folder (`file:///shared/run1` or a plain path), a bucket (`s3://`, `gs://`, `az://`,
    `hf://`; docs/stores.md), `memory://name` within this process, or, at one's own risk, anything that fsspec knows.

    With `create` False a folder that isn't there is an error, not a new store. Raises ValueError for a scheme that
    isn't known, StoreError for a place that can't be used.
    """
    scheme, separator, _ = uri.partition("://")
    if not separator:
        if not uri:
            raise ValueError("the store's URI is empty: give a folder, like file:///shared/run1")
        return LocalStore(uri, create=create)
    opener = _openers.get(scheme.lower())
    if opener is None and known_to_fsspec(scheme.lower()):
        opener = _open_remote
    if opener is None:
        known = ", ".join(f"{name}://" for name in sorted(_openers))
        raise ValueError(
            f"no store for {scheme}:// in this version, only {known} and plain paths; "
            "a shared folder works across machines, and register_scheme adds a store of your own"
        )
    return opener(uri, create)
