"""What every message about a recipe needs: where a key was written, and what may have been meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import NamedTuple

__all__ = ["Place", "nearest"]


class Place(NamedTuple):
    """Where keys were written, for messages."""

    file: str
    lines: Mapping[str, int]
    overridden: frozenset[str]

    def of(self, key: str) -> str:
        if key in self.overridden:
            return f"{key} (given on the command line)"
        line = self.lines.get(key)
        return f"{self.file}:{line}: {key}" if line else f"{self.file}: {key}" if self.file else key


def nearest(name: str, known: Iterable[str]) -> str:
    """' Did you mean ...?' or nothing."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""
