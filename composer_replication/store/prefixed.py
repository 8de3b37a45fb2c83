"""A part of a store, as a store of its own."""

from __future__ import annotations

from collections.abc import Iterable

from composer_replication.store import details
from composer_replication.store.base import Buffer, ObjectStore
from composer_replication.store.keys import check_key

__all__ = ["PrefixedStore"]


class PrefixedStore:
    """All keys of `store` that begin with `prefix/`, without that beginning."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self._prefix = check_key(prefix.strip("/")) + "/"

    @property
    def uri(self) -> str:
        return f"{self._store.uri.rstrip('/')}/{self._prefix.rstrip('/')}"

    def put(self, key: str, data: Buffer) -> None:
        self._store.put(self._prefix + check_key(key), data)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self._store.put_if_absent(self._prefix + check_key(key), data)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        return self._store.get(self._prefix + check_key(key), max_bytes=max_bytes)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self._store.get_range(self._prefix + check_key(key), start, stop)

    def list(self, prefix: str) -> list[str]:
        return [key[len(self._prefix) :] for key in self._store.list(self._prefix + prefix)]

    def sizes(self, prefix: str) -> dict[str, int | None]:
        found = details.sizes(self._store, self._prefix + prefix)
        return {key[len(self._prefix) :]: size for key, size in found.items()}

    def modified_seconds(self, key: str) -> float | None:
        return details.modified_seconds(self._store, self._prefix + check_key(key))

    def delete(self, keys: Iterable[str]) -> None:
        self._store.delete(self._prefix + check_key(key) for key in keys)
