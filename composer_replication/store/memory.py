"""A store in this process's memory, for tests and for fleets of threads."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from composer_replication.errors import ObjectCorrupt, ObjectExists, ObjectMissing
from composer_replication.store.base import Buffer
from composer_replication.store.keys import check_key

__all__ = ["MemoryStore"]


class MemoryStore:
    """A dict under a lock. `MemoryStore()` is private; `open_store("memory://name")` is shared within the process."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        return f"memory://{self._name}"

    def put(self, key: str, data: Buffer) -> None:
        check_key(key)
        copy = bytes(data)
        with self._lock:
            self._objects[key] = copy

    def put_if_absent(self, key: str, data: Buffer) -> None:
        check_key(key)
        copy = bytes(data)
        with self._lock:
            if key in self._objects:
                raise ObjectExists(f"{key} is there already ({self.uri})")
            self._objects[key] = copy

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        data = self._find(key)
        if max_bytes is not None and len(data) > max_bytes:
            raise ObjectCorrupt(f"{key} has {len(data)} bytes, at most {max_bytes} expected ({self.uri})")
        return data

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        if not 0 <= start <= stop:
            raise ValueError(f"not a range of bytes: [{start}, {stop})")
        return self._find(key)[start:stop]

    def list(self, prefix: str) -> list[str]:
        with self._lock:
            return sorted(key for key in self._objects if key.startswith(prefix))

    def sizes(self, prefix: str) -> dict[str, int]:
        """All keys that begin with `prefix`, and their sizes in bytes."""
        with self._lock:
            return {key: len(data) for key, data in self._objects.items() if key.startswith(prefix)}

    def delete(self, keys: Iterable[str]) -> None:
        names = [check_key(key) for key in keys]
        with self._lock:
            for key in names:
                self._objects.pop(key, None)

    def _find(self, key: str) -> bytes:
        check_key(key)
        with self._lock:
            try:
                return self._objects[key]
            except KeyError:
                raise ObjectMissing(f"{key} isn't there ({self.uri})") from None
