"""Clean-up of an inner optimizer whose replica produced a non-finite pseudo-gradient.

Invariant: finite state is never touched. Restoring the anchor alone would not help: Adam's moments keep a NaN for ever.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["repair_optimizer_state"]


@torch.no_grad()
def repair_optimizer_state(optimizer: torch.optim.Optimizer) -> int:
    """Zero every floating-point state tensor that holds a non-finite value; returns how many were zeroed."""
    repaired = 0
    for state in optimizer.state.values():
        for value in map(_local, state.values()):
            if isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all()):
                value.zero_()
                repaired += 1
    return repaired


def _local(value: Any) -> Any:
    """Of a sharded tensor, what this process holds."""
    return value.to_local() if type(value).__name__ == "DTensor" else value
