"""A lock on a file: one process at a time, for as long as it lives.

Invariant: a file system that has no locks keeps nobody out, whatever filelock's version makes of it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["locked"]


@contextmanager
def locked(path: Path, *, wait_seconds: float = 0.0) -> Iterator[bool]:
    """Gives False if another holds the lock after that time, and True if nobody does or none could be had there."""
    from filelock import FileLock, Timeout

    lock, free = FileLock(path), True
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if _has_locks(path.parent):
            try:
                lock.acquire(timeout=wait_seconds)
            except Timeout:
                free = False
    except (OSError, NotImplementedError):
        pass
    try:
        yield free
    finally:
        lock.release()


def _has_locks(folder: Path) -> bool:
    """Older filelocks say of a lock that can't be had the same as of one that is held: try one that nobody holds."""
    from filelock import FileLock

    try:
        # Newer ones make do with a file that is there or isn't, and can outlive its maker: this one is there.
        descriptor, name = tempfile.mkstemp(prefix=".lock-", dir=folder)
    except OSError:
        return True
    os.close(descriptor)
    probe = FileLock(name)
    try:
        probe.acquire(timeout=0)
    except (OSError, NotImplementedError):  # Timeout is one, too
        return False
    finally:
        probe.release()
        with suppress(OSError):
            os.unlink(name)
    return True
