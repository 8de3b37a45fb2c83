"""What the trainer's loops say about the steps ahead: position, budget, schedules.

Invariant: reads the trainer, and changes nothing but the schedulers that `forward` is asked to move.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from composer_replication.preview import LoopPosition, Previewer, Scheduled

__all__ = ["forward_schedulers", "loop_position", "make_previewer", "remaining_steps", "is_final_batch"]


def loop_position(trainer: Trainer) -> LoopPosition:
    """Where training stands after the batch that was just done (or restored)."""
    epochs, batches = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress
    length = trainer.num_training_batches
    done = batches.current.ready
    over = done >= length or (batches.is_last_batch and done > 0)
    return LoopPosition(
        batches_per_epoch=int(length) if math.isfinite(length) and length >= 1 else None,
        accumulate=trainer.accumulate_grad_batches,
        batch=0 if over else done,
        epoch=epochs.ready if over else max(epochs.ready - 1, 0),
    )


def remaining_steps(trainer: Trainer, module: LightningModule, *, skipped: int = 0) -> int | None:
    """Optimizer steps left in this fit's budget; None if there is none or it can't be told.

    `skipped` steps of the fleet that this replica never took are taken off too.
    """
    if module.automatic_optimization:
        try:
            total = trainer.estimated_stepping_batches
        except MisconfigurationException:  # accumulation that changes with the epoch
            return None
    else:
        # With several optimizers the trainer's count adds them up, and without max_steps nothing tells.
        total = trainer.max_steps if len(trainer.optimizers) == 1 else -1
    if total < 0 or math.isinf(total):
        return None
    return max(int(total) - trainer.global_step - skipped, 0)


def is_final_batch(trainer: Trainer) -> bool:
    """True if no batch follows the present one in this fit, as far as can be told before the epoch's last hooks."""
    if trainer.max_steps >= 0 and trainer.global_step >= trainer.max_steps:
        return True
    epochs = trainer.max_epochs
    return trainer.is_last_batch and epochs is not None and 0 <= epochs <= trainer.current_epoch + 1


def make_previewer(trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> Previewer:
    mine = [c for c in trainer.lr_scheduler_configs if getattr(c.scheduler, "optimizer", optimizer) is optimizer]
    because = ""
    if mine and not module.automatic_optimization:
        because = "with manual optimization the module steps its schedulers by hand"
    elif mine and is_overridden("lr_scheduler_step", module):
        because = "lr_scheduler_step is overridden"
    return Previewer(
        optimizer,
        [Scheduled(scheduler=c.scheduler, interval=c.interval, frequency=c.frequency) for c in mine],
        pinned=(module, trainer),
        constant_because=because,
    )


def forward_schedulers(trainer: Trainer, module: LightningModule, steps: int) -> None:
    """Move the per-step schedulers as far as `steps` optimizer steps would have, and one batch a step."""
    if not module.automatic_optimization:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that no optimizer step went before: that is the point
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step" and not config.reduce_on_plateau:
                scheduler: Any = config.scheduler
                for _ in range(steps // config.frequency):
                    module.lr_scheduler_step(scheduler, None)
