"""A language model as a ComposerModel: next-token loss, and the same for validation. Needs `composer`."""

from __future__ import annotations

from typing import Any

from composer.models import ComposerModel
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric

from composer_replication.tasks.next_token import logits_of, next_token_loss, target_count

__all__ = ["LanguageModel"]


class LanguageModel(ComposerModel):
    """Wraps a module that maps ids (batch, time) to logits (batch, time, classes), or to an output that has `logits`.

    Batches are `{"input_ids", "labels"}`, labels already shifted by one. The loss and the metric
    `validation_loss` are in nats per label (a byte or a token): the mean of a batch, and that of all labels.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return logits_of(self.model, batch)

    def loss(self, outputs: Tensor, batch: dict[str, Tensor], *_: Any, **__: Any) -> Tensor:
        return next_token_loss(outputs, batch["labels"])

    def eval_forward(self, batch: dict[str, Tensor], outputs: Tensor | None = None) -> Tensor:
        return self.forward(batch) if outputs is None else outputs

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        return {} if is_train else {"validation_loss": MeanMetric()}

    def update_metric(self, batch: dict[str, Tensor], outputs: Tensor, metric: Metric) -> None:
        metric.update(self.loss(outputs, batch), weight=target_count(batch["labels"]))
