"""What a key may look like: one rule for every store.

Invariant: a checked key can't name anything outside the store's root, on any file system.
"""

from __future__ import annotations

__all__ = ["check_key"]


def check_key(key: str) -> str:
    """Give `key` back if it is a relative, "/"-separated name without hidden or empty parts; else raise ValueError.

    Parts that begin with "." are refused altogether: that covers "." and "..", and keeps the names of unfinished
    files (which begin with a dot) out of reach.
    """
    if not key or any(part == "" or part.startswith(".") for part in key.split("/")):
        raise ValueError(f"not a key of a store: {key!r} (relative, no empty or hidden parts, no '..')")
    if "\\" in key or any(ord(character) < 32 for character in key):
        raise ValueError(f"not a key of a store: {key!r} (no backslash, no control characters)")
    return key
