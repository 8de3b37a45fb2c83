"""Train one model on GPUs that sit far apart, synchronising through nothing but an object store."""

from __future__ import annotations

__version__ = "0.1.0"
