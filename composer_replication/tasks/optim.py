"""Inner optimizers and learning-rate schedules by name, for built-in models.

Invariant: a schedule is a `LambdaLR` over a pure function of the step, so that it can be previewed exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["OPTIMIZERS", "SCHEDULES", "build_optimizer", "build_scheduler", "lr_factor"]

OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}
SCHEDULES = ("cosine", "linear", "constant")


def build_optimizer(
    parameters: Iterable[nn.Parameter], *, name: str, lr: float, weight_decay: float = 0.0, args: Mapping[str, Any] = {}
) -> Optimizer:
    """`name` in any case. Tensors with fewer than two dimensions (norms, biases) are not decayed."""
    make = OPTIMIZERS.get(name.lower())
    if make is None:
        raise ValueError(f"unknown optimizer {name!r}: one of {', '.join(OPTIMIZERS)}")
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return make([group for group in groups if group["params"]], lr=lr, **args)


def lr_factor(step: int, *, name: str, steps: int, warmup_steps: int, final_fraction: float) -> float:
    """What the peak learning rate is multiplied with at inner step `step` (from 0)."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if name == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    fall = 0.5 * (1.0 + math.cos(math.pi * progress)) if name == "cosine" else 1.0 - progress
    return final_fraction + (1.0 - final_fraction) * fall


def build_scheduler(
    optimizer: Optimizer, *, name: str, steps: int, warmup_steps: int = 0, final_fraction: float = 0.0
) -> LambdaLR:
    if name not in SCHEDULES:
        raise ValueError(f"unknown scheduler {name!r}: one of {', '.join(SCHEDULES)}")
    return LambdaLR(
        optimizer,
        partial(lr_factor, name=name, steps=steps, warmup_steps=warmup_steps, final_fraction=final_fraction),
    )
