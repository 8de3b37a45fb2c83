"""Squared norms with one fixed order of additions, and a test for finite values.

Invariant: the same elements give the same bits, whatever the number of threads, the instruction set or the device.

Element k belongs to lane k mod LANES. A lane adds its squares in order; then the upper half of the lanes is added to
the lower half until one is left. Each of these is an elementwise float64 operation, rounded once, so nothing is left
for a library to reorder. (`torch.sum` and `torch.linalg.norm` change in the last bits with the number of threads.)
The square of a float32 value has 48 significant bits and is exact in float64. That is why `addcmul_` may be used here
and nowhere else: with an exact product, a fused and an unfused multiply-add round to the same value.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from composer_replication.collective.scratch import scratch

__all__ = ["LANES", "all_finite", "difference_square_norm", "square_norm"]

LANES = 131_072  # 1 MiB of float64: stays in cache, and is long enough to be shared by a few threads


def _lanes(elements: int) -> int:
    # Lanes that no element reaches would hold zeros, and adding zero changes no bit: a short tensor needs fewer.
    return min(LANES, 1 << max(elements - 1, 0).bit_length())


def _fold(lanes: Tensor) -> float:
    count = lanes.numel()
    while count > 1:
        count //= 2
        lanes[:count].add_(lanes[count : 2 * count])
    return float(lanes[0].item())


def square_norm(values: Tensor) -> float:
    """Sum of the squares of a 1-D float32 tensor, in float64. Not finite exactly when an element is not finite.

    (The square of the greatest float32 is far below the greatest float64, so no sum of finite values overflows.)
    """
    return _square_norm(values, None)


def difference_square_norm(start: Tensor, local: Tensor) -> float:
    """`square_norm(start - local)`, the difference rounded to float32, without room for the whole difference."""
    if start.shape != local.shape:
        raise ValueError(f"start has shape {list(start.shape)}, local has {list(local.shape)}")
    return _square_norm(start, local)


def _square_norm(values: Tensor, minus: Tensor | None) -> float:
    if values.dim() != 1 or values.dtype != torch.float32:
        raise ValueError(f"values must be 1-D float32, got {values.dtype} of shape {list(values.shape)}")
    elements = values.numel()
    if elements == 0:
        return 0.0
    width = _lanes(elements)
    lanes = scratch("norm lanes", width, torch.float64, values.device).zero_()
    wide = scratch("norm squares", width, torch.float64, values.device)
    difference = None if minus is None else scratch("norm difference", width, torch.float32, values.device)
    with torch.no_grad():
        others = () if minus is None else torch.split(minus, width)
        for index, block in enumerate(torch.split(values, width)):
            size = block.numel()
            if difference is not None:
                block = torch.sub(block, others[index], out=difference[:size])
            square = wide[:size].copy_(block)
            lanes[:size].addcmul_(square, square)
        return _fold(lanes)


def all_finite(values: Tensor) -> bool:
    """True if no element is infinite or NaN. Reads the values once; the extremes depend on no order."""
    for block in torch.split(values.detach(), LANES) if values.numel() else ():
        low, high = torch.aminmax(block)  # NaN goes through both
        if not (math.isfinite(low.item()) and math.isfinite(high.item())):
            return False
    return True
