"""Bytes under keys: all that the rounds ask of a store.

Keys are relative, "/"-separated, without "." or "..". Objects appear whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

__all__ = ["Buffer", "ObjectStore"]

Buffer = bytes | bytearray | memoryview


class ObjectStore(Protocol):
    """A place for immutable objects. Safe to use from several threads and processes."""

    @property
    def uri(self) -> str:
        """Where it is, as the user would write it. Never holds credentials."""
        ...

    def put(self, key: str, data: Buffer) -> None:
        """Write an object, replacing any that is there."""
        ...

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Write an object unless there is one: atomic among all writers. Raises ObjectExists."""
        ...

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """The whole object. Raises ObjectMissing; ObjectCorrupt if it is larger than `max_bytes`."""
        ...

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of an object, fewer if it ends before. Raises ObjectMissing."""
        ...

    def list(self, prefix: str) -> list[str]:
        """All keys that begin with `prefix`, sorted. A hint: what counts is what `get` finds."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that are gone already are passed over."""
        ...
