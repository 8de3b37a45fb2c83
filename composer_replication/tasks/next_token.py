"""The loss of a language model: one formula for every trainer, and for loops without one."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["logits_of", "next_token_loss"]


def logits_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """(batch, time, classes), of a module that gives them or an output that has them as `logits`."""
    outputs = model(batch["input_ids"])
    return getattr(outputs, "logits", outputs)


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over all labels, in nats. `labels` (batch, time) are already shifted by one."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
