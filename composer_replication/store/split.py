"""Two stores as one: small objects that must be created only once here, big ones there.

Invariant: where a key lies is a function of the key alone. Nothing is created-if-absent in the store of the blobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from composer_replication.store import details
from composer_replication.store.base import Buffer, ObjectStore

__all__ = ["SplitStore"]


class SplitStore:
    """Keys for which `is_blob` is true lie in `blobs`, all others in `control`."""

    def __init__(self, blobs: ObjectStore, control: ObjectStore, is_blob: Callable[[str], bool]) -> None:
        self._blobs = blobs
        self._control = control
        self._is_blob = is_blob

    @property
    def uri(self) -> str:
        return f"{self._blobs.uri} (control: {self._control.uri})"

    def put(self, key: str, data: Buffer) -> None:
        self._of(key).put(key, data)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        if self._is_blob(key):
            raise ValueError(f"{key} is a blob: only pointers are created once")
        self._control.put_if_absent(key, data)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        return self._of(key).get(key, max_bytes=max_bytes)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self._of(key).get_range(key, start, stop)

    def list(self, prefix: str) -> list[str]:
        return sorted(self.sizes(prefix))

    def sizes(self, prefix: str) -> dict[str, int | None]:
        control = {key: size for key, size in details.sizes(self._control, prefix).items() if not self._is_blob(key)}
        return control | {key: size for key, size in details.sizes(self._blobs, prefix).items() if self._is_blob(key)}

    def modified_seconds(self, key: str) -> float | None:
        return details.modified_seconds(self._of(key), key)

    def delete(self, keys: Iterable[str]) -> None:
        names = list(keys)
        for store, wanted in ((self._blobs, True), (self._control, False)):
            mine = [key for key in names if self._is_blob(key) == wanted]
            if mine:
                store.delete(mine)

    def _of(self, key: str) -> ObjectStore:
        return self._blobs if self._is_blob(key) else self._control
