"""A language model as a LightningModule: next-token loss, the recipe's optimizer and schedule. Needs `lightning`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MeanMetric

from composer_replication.tasks.next_token import logits_of, next_token_loss, target_count

__all__ = ["LanguageModule"]


class LanguageModule(LightningModule):
    """Wraps a module that maps ids (batch, time) to logits (batch, time, classes), or to an output that has `logits`.

    Batches are `{"input_ids", "labels"}`, labels already shifted by one. `loss` and `validation_loss` are logged, both
    in nats per label (a byte or a token): `loss` the mean of a batch, `validation_loss` that of all labels.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        make_optimizer: Callable[[nn.Module], Optimizer],
        make_scheduler: Callable[[Optimizer], LRScheduler],
    ):
        super().__init__()
        self.model = model
        self._make_optimizer = make_optimizer
        self._make_scheduler = make_scheduler
        self._validation = MeanMetric()

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        return next_token_loss(logits_of(self.model, batch), batch["labels"])

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    @torch.no_grad()
    def validation_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        # Weighted by labels, and added up over the processes of the replica. (Lightning's own mean of a number over
        # processes takes the mean of the integer weights, and drops its fraction.)
        # It leaves out what is no number, and a diverged model would look fine: that counts as infinite.
        loss, count = self._loss(batch), target_count(batch["labels"])
        self._validation.update(torch.nan_to_num(loss, nan=torch.inf), weight=count)
        self.log("validation_loss", self._validation, batch_size=batch["input_ids"].shape[0])

    def configure_optimizers(self) -> Any:
        optimizer = self._make_optimizer(self.model)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self._make_scheduler(optimizer), "interval": "step"},
        }
