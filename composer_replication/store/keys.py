"""What a key may look like: one rule for every store.

Invariant: a checked key can't name anything outside the store's root, on any file system.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

__all__ = ["check_key", "check_steps"]

# A part that is empty or begins with a dot; a backslash or a control character anywhere.
_REFUSED = re.compile(r"(?:\A|/)(?:\.|/|\Z)|[\\\x00-\x1f]")


def check_key(key: str) -> str:
    """Give `key` back if it is a relative, "/"-separated name without hidden or empty parts; else raise ValueError.

    Parts that begin with "." are refused altogether: that covers "." and "..", and keeps the names of unfinished
    files (which begin with a dot) out of reach.
    """
    if _REFUSED.search(key):
        raise ValueError(
            f"not a key of a store: {key!r} (relative, no empty or hidden parts, no '..', no backslash or control "
            "characters)"
        )
    return key


def check_steps(path: str) -> None:
    """Raise ValueError if the %xx of a URI's path hide a "." or ".." among its parts."""
    for part in path.split("/"):
        plain = unquote(part)
        if "%" in part and not {".", ".."}.isdisjoint(plain.split("/")):
            raise ValueError(f"{part!r} in a store's URI stands for {plain!r}: write the path that is meant")
