"""Clean-up of an inner optimizer whose replica produced a non-finite pseudo-gradient.

Invariant: finite state is never touched. Restoring the anchor alone would not help: Adam's moments keep a NaN for ever.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["repair_optimizer_state"]


@torch.no_grad()
def repair_optimizer_state(optimizer: torch.optim.Optimizer) -> int:
    """Zero every floating-point state tensor that holds a non-finite value; returns how many were zeroed."""
    repaired = 0
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all()):
                value.zero_()
                repaired += 1
    return repaired
