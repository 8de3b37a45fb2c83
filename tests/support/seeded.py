"""Weights from a seed, whatever other threads draw from torch's own generator meanwhile."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

__all__ = ["seeded"]

_M = TypeVar("_M", bound=nn.Module)


def seeded(module: _M, seed: int) -> _M:
    """`module`, its floating-point parameters drawn anew, as widely as torch draws those of a small linear layer."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) - 0.5)
    return module
