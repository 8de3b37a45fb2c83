"""A round's metrics for Lightning's loggers and progress bar.

Invariant: decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch import LightningModule, Trainer

__all__ = ["log_round"]


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
