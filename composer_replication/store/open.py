"""From a URI to a store: a table of schemes, so that remote ones can be added without touching this file."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from composer_replication.store.base import ObjectStore
from composer_replication.store.keys import check_steps
from composer_replication.store.local import LocalStore
from composer_replication.store.memory import MemoryStore
from composer_replication.store.remote import RemoteStore, known_to_fsspec

__all__ = ["open_store", "register_scheme"]

Opener = Callable[[str, bool], ObjectStore]

_memory: dict[str, MemoryStore] = {}
_lock = threading.Lock()


def _open_file(uri: str, create: bool) -> ObjectStore:
    parts = urlsplit(uri)
    plain = f"file://{parts.netloc}{parts.path}"  # without what might be a secret
    if parts.netloc not in ("", "localhost"):
        if "@" in parts.netloc:
            raise ValueError("a file:// URI with something before an @: a folder takes no credentials")
        raise ValueError(f"{plain!r}: a file URI has three slashes, file:///{parts.netloc}{parts.path}")
    if not parts.path.startswith("/"):
        raise ValueError(f"{plain!r}: a file URI is file:// and an absolute path, like file:///shared/run1")
    if "?" in uri or "#" in uri:
        raise ValueError(
            f"{plain!r}: a file URI is file:// and an absolute path, and nothing after it; a ? or # in a folder's "
            "name is written %3F or %23"
        )
    check_steps(parts.path)
    return LocalStore(unquote(parts.path), create=create)


def _open_memory(uri: str, create: bool) -> ObjectStore:
    name = uri.partition("://")[2]
    with _lock:
        return _memory.setdefault(name, MemoryStore(name))


def _open_remote(uri: str, create: bool) -> ObjectStore:
    # No request is made here: buckets aren't made for people, and the first operation says what is wrong.
    return RemoteStore(uri)


def _refuse_web(uri: str, create: bool) -> ObjectStore:
    scheme = uri.partition("://")[0].lower()
    raise ValueError(
        f"{scheme}:// can only be read, and replicas write to their store: use a folder, or the bucket's own scheme "
        "(s3://bucket/prefix?endpoint_url=... for a server that speaks S3)"
    )


_REMOTE = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf")
_WEB = ("http", "https")
_openers: dict[str, Opener] = {
    "file": _open_file,
    "memory": _open_memory,
    **dict.fromkeys(_REMOTE, _open_remote),
    **dict.fromkeys(_WEB, _refuse_web),
}
_LOGIN = re.compile(r"[^/.~:@][^/:@]+:[^@]*@")  # name:password@host, where a path or a scheme should begin


def register_scheme(scheme: str, opener: Opener) -> None:
    """Make `open_store` understand `scheme://…`: `opener(uri, create)` gives the store."""
    _openers[scheme] = opener


def open_store(uri: str, *, create: bool = True, options: Mapping[str, Any] | None = None) -> ObjectStore:
    """The store at `uri`: a folder (`file:///shared/run1` or a plain path), a bucket (`s3://`, `gs://`, `az://`,
    `hf://`; docs/stores.md), `memory://name` within this process, or, at one's own risk, anything that fsspec knows.

    With `create` False a folder that isn't there is an error, not a new store. `options` go to the fsspec filesystem of
    a remote store; they may hold credentials, and are never shown. Raises ValueError for a scheme that isn't known,
    StoreError for a place that can't be used.
    """
    if "\0" in uri:
        raise ValueError("the store's URI holds a NUL byte, which no place can have in its name")
    scheme, separator, _ = uri.partition("://")
    if not separator:
        _refuse_options(uri, options)
        return _open_path(uri, create)
    opener = _openers.get(scheme.lower())
    if opener is None and known_to_fsspec(scheme.lower()):
        opener = _open_remote
    if options and opener is _open_remote:
        return RemoteStore(uri, options=options)
    _refuse_options(uri, options)
    if opener is None:
        known = ", ".join(f"{name}://" for name in sorted(_openers) if name not in _WEB)
        raise ValueError(
            f"no store for {scheme}:// in this version, only {known} and plain paths; "
            "a shared folder works across machines, and register_scheme adds a store of your own"
        )
    return opener(uri, create)


def _refuse_options(uri: str, options: Mapping[str, Any] | None) -> None:
    if options:
        raise ValueError(
            f"options {sorted(options)} mean nothing to the store {uri}, which is not one of fsspec's: leave them out"
        )


def _open_path(path: str, create: bool) -> ObjectStore:
    """A folder by its plain path, or what was nearly a URI."""
    if not path.strip():
        raise ValueError("the store's URI is empty: give a folder, like file:///shared/run1")
    if _LOGIN.match(path):
        raise ValueError(
            "the store looks like a name and a password before an @: credentials don't belong there, and a URI begins "
            "with its scheme, like s3://bucket/prefix"
        )
    scheme, colon, rest = path.partition(":")
    if colon and scheme.lower() == "file":
        return _open_file(path, create)
    if colon and scheme.lower() in _openers:
        raise ValueError(f"a URI has two slashes after its scheme: {scheme}://{re.split('[?#]', rest.lstrip('/'))[0]}")
    return LocalStore(path, create=create)
