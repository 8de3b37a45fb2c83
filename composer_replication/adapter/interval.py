"""What one interval looked like, for people: loss and speed.

Invariant: decides nothing, and waits for the device only at boundaries.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

__all__ = ["Interval"]


class Interval:
    """Sums over the batches of one interval."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        self._loss: float | Tensor = 0.0
        self._batches = 0
        self._began = self._clock()

    def batch(self, loss: float | Tensor | None) -> None:
        """Add one batch's loss; None, and tensors of several elements, are left out."""
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                return
            loss = loss.detach().reshape(())
        if loss is not None:
            self._loss = self._loss + loss
            self._batches += 1

    def metrics(self, tokens: int | None) -> dict[str, float]:
        """Waits for the device."""
        seconds = max(self._clock() - self._began, 1e-9)
        found: dict[str, float] = {}
        if self._batches:
            found["loss"] = float(self._loss) / self._batches
        if tokens:
            found["tokens_per_second"] = tokens / seconds
        return found

    def state(self) -> list[float]:
        return [float(self._loss), float(self._batches)]

    def restore(self, state: list[float]) -> None:
        self._loss, self._batches = state[0], int(state[1])
