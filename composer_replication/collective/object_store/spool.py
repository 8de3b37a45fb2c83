"""Bytes that are set aside until they are needed: in memory up to a bound, in a temporary file beyond it.

Invariant: what is read back is what was put in. Safe to use from several threads; after `close` it takes nothing more.
"""

from __future__ import annotations

import tempfile
import threading
from typing import IO

from composer_replication.errors import StoreError
from composer_replication.store.base import Buffer

__all__ = ["SPOOL_BYTES", "Spool"]

SPOOL_BYTES = 64 * 1024 * 1024


class Spool:
    def __init__(self, max_bytes: int = SPOOL_BYTES) -> None:
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=max_bytes)  # noqa: SIM115
        self._lock = threading.Lock()
        self._bytes = 0
        self._trouble = ""

    def put(self, data: Buffer) -> int:
        """Where the bytes begin. Raises ValueError when closed, StoreError when there is no room."""
        with self._lock:
            self._check()
            try:
                offset = self._file.seek(0, 2)
                self._file.write(data)
            except OSError as error:
                raise self._failed(error, self._bytes + len(data)) from error
            self._bytes = offset + len(data)
            return offset

    def get(self, offset: int, size: int) -> bytes:
        with self._lock:
            self._check()
            try:
                self._file.seek(offset)
                return self._file.read(size)
            except OSError as error:
                raise self._failed(error, self._bytes) from error

    def close(self) -> None:
        with self._lock:
            try:
                self._file.close()
            except OSError:  # what couldn't be written needn't be any more
                pass

    def _check(self) -> None:
        # Some of what is in the file may be lost with the write that failed: nothing of it is used any more.
        if self._trouble:
            raise StoreError(self._trouble)

    def _failed(self, error: OSError, needed: int) -> StoreError:
        self._trouble = (
            f"the temporary folder {tempfile.gettempdir()} can't hold the {needed:,} bytes that this round has set "
            f"aside so far ({error.strerror or error}): free some space there, or name another folder in "
            "TMPDIR; a round needs there up to twice its encoded size"
        )
        return StoreError(self._trouble)
