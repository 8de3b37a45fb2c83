"""Non-padding input tokens of a batch.

Invariant: labels never decide, and nothing waits for the device: counts stay where the batch is until asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["TokenCount", "TokenFunction", "count_tokens"]

TokenFunction = Callable[[Any], "int | Tensor"]


def count_tokens(batch: Any, *, pad_token_id: int | None = None, token_fn: TokenFunction | None = None) -> Any:
    """The number of non-padding input tokens: an int, a 0-dimensional tensor, or None if the batch doesn't tell.

    In this order: `token_fn(batch)`; the ones in `attention_mask` (batch x length); the elements of `input_ids`
    that aren't `pad_token_id` (all of them when there is no pad id).
    """
    if token_fn is not None:
        return token_fn(batch)
    if not isinstance(batch, Mapping):
        return None
    mask = batch.get("attention_mask")
    # A mask of more dimensions says who may look at whom, not what is padding.
    if isinstance(mask, Tensor) and mask.dim() <= 2:
        return torch.count_nonzero(mask)
    ids = batch.get("input_ids")
    if isinstance(ids, Tensor):
        return ids.numel() if pad_token_id is None else torch.count_nonzero(ids != pad_token_id)
    return None


class TokenCount:
    """Adds up the tokens behind the steps that changed the weights.

    Batches wait in `_window` until their optimizer step is known to be real (then they count) or skipped (then they
    don't). One batch that can't be counted makes the interval's count None.
    """

    def __init__(self) -> None:
        self._window: int | Tensor | None = 0
        self._total: int | Tensor | None = 0

    def batch(self, count: int | Tensor | None) -> None:
        self._window = None if count is None or self._window is None else self._window + count

    def step(self, skipped: Tensor | None) -> None:
        """The window's step was taken; `skipped` is 1 on the device if a fused optimizer left the weights alone."""
        window, self._window = self._window, 0
        if window is None or self._total is None:
            self._total = None
        elif skipped is None:
            self._total = self._total + window
        else:
            self._total = self._total + (window * (1 - skipped)).to(torch.int64)

    def drop(self) -> None:
        """The window's step was skipped."""
        self._window = 0

    def take(self) -> int | None:
        """What counts since the last call. Waits for the device."""
        total, self._total = self._total, 0
        return None if total is None else int(total)

    def waiting(self) -> int | None:
        """Tokens of the unfinished window, for a checkpoint. Waits for the device."""
        return None if self._window is None else int(self._window)

    def restore(self, waiting: int | None) -> None:
        self._window, self._total = waiting, 0
