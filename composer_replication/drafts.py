"""A file written beside its place, and moved there when it is whole.

Invariant: whoever reads the place finds the old file or the new one, never a part; a write that fails leaves nothing.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["draft_of", "written_whole"]

_OWN = uuid.uuid4().hex[:8]  # processes in containers may have the same number


def draft_of(path: Path) -> Path:
    """A name beside `path` that no other process has; always the same one in this process."""
    return path.with_name(f".{path.name}.{os.getpid()}-{_OWN}")


@contextmanager
def written_whole(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Gives the draft to write; it takes the place of `path` when the block has ended well.

    `durable`: its bytes are on the disk before that.
    """
    draft = draft_of(path)
    try:
        yield draft
        if durable:
            with open(draft, "rb+") as file:
                os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        with suppress(OSError):
            draft.unlink()
