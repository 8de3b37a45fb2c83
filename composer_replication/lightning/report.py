"""What one interval looked like, for people: loss, speed, the progress bar, loggers, heartbeat.

Invariant: decides nothing, and waits for the device only at boundaries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

__all__ = ["Interval", "log_round"]


class Interval:
    """Sums over the batches of one interval."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        self._loss: float | Tensor = 0.0
        self._batches = 0
        self._began = self._clock()

    def batch(self, outputs: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._loss = self._loss + loss.detach().reshape(())
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


def log_round(trainer: Trainer, module: LightningModule, metrics: Mapping[str, float]) -> None:
    """Give a round's metrics to every logger at the step of the present batch, and a line to the progress bar."""
    # Through `self.log` the loggers would get them only at multiples of log_every_n_steps, late or not at all.
    step = trainer.fit_loop.epoch_loop._batches_that_stepped
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=step)
    if trainer.barebones or module._current_fx_name != "on_train_batch_end":  # elsewhere there is no bar to write to
        return
    bar = {
        "round": metrics.get("autoloco/round"),
        "horizon": metrics.get("autoloco/horizon"),
        "interval_loss": metrics.get("autoloco/loss"),
        "wait": metrics.get("autoloco/wait_seconds"),
    }
    for name, value in bar.items():
        if value is not None:
            module.log(name, value, prog_bar=True, logger=False, on_step=True, on_epoch=False, batch_size=1)
