"""Bytes that are set aside until they are needed: in memory up to a bound, in a temporary file beyond it.

Invariant: what is read back is what was put in. Safe to use from several threads; after `close` it takes nothing more.
"""

from __future__ import annotations

import tempfile
import threading
from typing import IO

from composer_replication.store.base import Buffer

__all__ = ["SPOOL_BYTES", "Spool"]

SPOOL_BYTES = 64 * 1024 * 1024


class Spool:
    def __init__(self, max_bytes: int = SPOOL_BYTES) -> None:
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=max_bytes)  # noqa: SIM115
        self._lock = threading.Lock()

    def put(self, data: Buffer) -> int:
        """Where the bytes begin. Raises ValueError when closed."""
        with self._lock:
            offset = self._file.seek(0, 2)
            self._file.write(data)
            return offset

    def get(self, offset: int, size: int) -> bytes:
        with self._lock:
            self._file.seek(offset)
            return self._file.read(size)

    def close(self) -> None:
        with self._lock:
            self._file.close()
