"""Settings that are numbers, checked alike for all built-in data."""

from __future__ import annotations

__all__ = ["check_sizes"]


def check_sizes(least: int = 1, **sizes: int | None) -> None:
    """Raises ValueError for the first below `least`, by its name; None stands for a default."""
    for name, value in sizes.items():
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
