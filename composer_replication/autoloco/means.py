"""The mean of the numbers that replicas decide by.

Invariant: the same numbers in the same order have the same mean, to the last bit, under every Python. The built-in
`sum` compensates for rounding from Python 3.12 on, and has other last bits there than before.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import nan

__all__ = ["mean"]


def mean(values: Iterable[float]) -> float:
    """Added one after another, from the first; not a number where there are none."""
    total, count = 0.0, 0
    for value in values:
        total += value
        count += 1
    return total / count if count else nan
