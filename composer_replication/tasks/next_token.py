"""The loss of a language model: one formula for every trainer, and for loops without one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["IGNORED", "logits_of", "next_token_loss", "target_count"]

IGNORED = -100  # the label of a position that nothing is to be predicted at


def logits_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """(batch, time, classes), of a module that gives them or an output that has them as `logits`.

    The model gets the ids alone. Padding stands at the right (`examples.py`), where a causal model's earlier positions
    don't see it.
    """
    outputs = model(batch["input_ids"])
    return getattr(outputs, "logits", outputs)


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over all labels but IGNORED, in nats. `labels` (batch, time) are already shifted by one."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)


def target_count(labels: Tensor) -> int:
    """The labels that `next_token_loss` is a mean of: a batch's weight in a mean over several. Waits for the device."""
    return int(torch.count_nonzero(labels != IGNORED))
