"""A file written beside its place, and moved there when it is whole.

Invariant: whoever reads the place finds the old file or the new one, never a part; a write that fails leaves nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["draft_of", "is_another", "written_whole"]

ABANDONED_SECONDS = 3600.0  # a draft that is being written changes more often than that
_HOST = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]
_OWN = uuid.uuid4().hex[:8]  # processes in containers may have the same number
_tidied: set[str] = set()  # places beside which this process has looked


def draft_of(path: Path) -> Path:
    """A name beside `path` that no other process has; always the same one in this process."""
    return path.with_name(f".{path.name}.{_HOST}-{os.getpid()}-{_OWN}")


@contextmanager
def written_whole(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Gives the draft to write; it takes the place of `path` when the block has ended well.

    `durable`: its bytes are on the disk before that.
    """
    draft = draft_of(path)
    if str(draft.absolute()) not in _tidied:
        _tidied.add(str(draft.absolute()))
        _remove_abandoned(path, draft)
    try:
        yield draft
        if durable:
            with open(draft, "rb+") as file:
                os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        with suppress(OSError):
            draft.unlink()


def _remove_abandoned(path: Path, own: Path) -> None:
    """Remove what killed writers of this place have left, as large as it may be. A folder that can't be tidied can be
    written to all the same."""
    form = re.compile(rf"\.{re.escape(path.name)}\.([0-9a-f]{{6}})-(\d+)-[0-9a-f]{{8}}")
    with suppress(OSError):
        left = [match for name in os.listdir(path.parent) if (match := form.fullmatch(name)) and name != own.name]
        if not left:
            return
        own.touch()
        now = own.stat().st_mtime  # by the file system's own clock
        own.unlink()
        for match in left:
            draft = path.with_name(match[0])
            with suppress(OSError):
                dead = match[1] == _HOST and not is_another(int(match[2]))
                if dead or draft.stat().st_mtime < now - ABANDONED_SECONDS:
                    draft.unlink()


def is_another(process: int) -> bool:
    """Another process with this id runs on this host."""
    if process == os.getpid():
        return False  # in a container an earlier life had the same id
    if os.name != "posix":
        return True  # where a signal can't be only tried
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
