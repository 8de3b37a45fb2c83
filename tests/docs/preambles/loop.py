"""What a reader of a page about loops has: a model, an optimizer, data and a loss."""

from functools import partial  # noqa: F401

import lightning.pytorch as pl  # noqa: F401
import torch
from torch import nn

from composer_replication import FixedPolicy

model = nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = [torch.randn(4, 3) for _ in range(8)]
policy = FixedPolicy(horizon=4)


def loss(model, batch):
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()
