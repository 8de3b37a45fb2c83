"""A store as the rounds use it: what may pass is tried again, and everything is counted.

Invariant: a refusal that means something (missing, there already, corrupt) is never tried again, nor is what the store
itself has tried again for long enough.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

from composer_replication.collective.object_store.wire import MAX_POINTER_BYTES
from composer_replication.errors import (
    ObjectCorrupt,
    ObjectExists,
    ObjectMissing,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from composer_replication.store.base import Buffer, ObjectStore

__all__ = ["RETRY_SECONDS", "Requests", "create", "there"]

RETRY_SECONDS = (0.1, 0.3, 0.9)

_T = TypeVar("_T")


def there(store: ObjectStore, key: str) -> bool:
    """Is there such a (small) object?"""
    try:
        store.get(key, max_bytes=MAX_POINTER_BYTES)
        return True
    except ObjectMissing:
        return False


def create(store: ObjectStore, key: str, data: Buffer) -> None:
    """Create an object; one that is there already stays."""
    try:
        store.put_if_absent(key, data)
    except ObjectExists:
        pass


class Requests:
    """An ObjectStore over another one; several threads may use it."""

    def __init__(self, store: ObjectStore, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._store = store
        self._sleep = sleep
        self._lock = threading.Lock()
        self.count: Counter[str] = Counter()
        self.bytes_sent = 0
        self.bytes_received = 0

    @property
    def uri(self) -> str:
        return self._store.uri

    def put(self, key: str, data: Buffer) -> None:
        self._try("put", lambda: self._store.put(key, data))
        self._add(sent=len(data))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        # A second try may be refused by the first one's success: callers read back what the store holds.
        self._try("create", lambda: self._store.put_if_absent(key, data))
        self._add(sent=len(data))

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        data = self._try("get", lambda: self._store.get(key, max_bytes=max_bytes))
        self._add(received=len(data))
        return data

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        data = self._try("get", lambda: self._store.get_range(key, start, stop))
        self._add(received=len(data))
        return data

    def list(self, prefix: str) -> list[str]:
        return self._try("list", lambda: self._store.list(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        names = list(keys)
        self._try("delete", lambda: self._store.delete(names))

    def _add(self, sent: int = 0, received: int = 0) -> None:
        with self._lock:
            self.bytes_sent += sent
            self.bytes_received += received

    def _try(self, kind: str, call: Callable[[], _T]) -> _T:
        for pause in (*RETRY_SECONDS, None):
            with self._lock:
                self.count[kind] += 1
            try:
                return call()
            except (ObjectMissing, ObjectExists, ObjectCorrupt, StoreRefused, StoreUnavailable):
                raise
            except StoreError:
                if pause is None:
                    raise
                self._sleep(pause)
        raise AssertionError("the last try returns or raises")
