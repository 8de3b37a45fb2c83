"""Working memory that is used again: a fresh megabyte costs several times its copy in page faults.

Invariant: a piece belongs to one thread and one purpose, and its content means nothing between two calls.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["scratch"]


class _Held(threading.local):
    def __init__(self) -> None:
        self.pieces: dict[str, Tensor] = {}


_held = _Held()


def scratch(purpose: str, elements: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """A 1-D tensor of `elements` elements with any content. On the CPU it is kept for the next call of this thread."""
    if device is not None and device.type != "cpu":
        return torch.empty(elements, dtype=dtype, device=device)
    piece = _held.pieces.get(purpose)
    if piece is None or piece.numel() < elements:
        piece = _held.pieces[purpose] = torch.empty(elements, dtype=dtype)
    return piece[:elements]
