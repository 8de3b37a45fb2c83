"""An interval's tensors, chunk by chunk as they are exchanged: out as pseudo-gradients, in as agreed means.

Invariant: one chunk is held at a time, in a buffer that the next one reuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from composer_replication.autoloco.outer import OuterCoefficients
from composer_replication.collective.layout import Layout
from composer_replication.diloco.tensors import SharedTensors

__all__ = ["apply_means", "chunk_reader", "interval_square_norm"]


def _buffer(layout: Layout) -> Tensor:
    return torch.empty(max((chunk.elements for chunk in layout.chunks), default=0))


def interval_square_norm(tensors: SharedTensors, layout: Layout) -> float:
    """Of the parameters' pseudo-gradient; nan exactly when an element, or a buffer's, isn't finite."""
    total, finite = 0.0, True
    for chunk in layout.chunks:
        for part in chunk.parts:
            square = tensors.square_norm(layout, part)
            finite = finite and math.isfinite(square)
            if layout.slots[part.slot].kind == "parameter":
                total += square
    return total if finite else math.nan


def chunk_reader(tensors: SharedTensors, layout: Layout) -> Callable[[int], Tensor]:
    """Gives the pseudo-gradient of the i-th chunk, until it is asked for the next."""
    buffer = _buffer(layout)

    def read(index: int) -> Tensor:
        offset = 0
        for part in layout.chunks[index].parts:
            tensors.pseudo_gradient_into(layout, part, buffer[offset : offset + part.elements])
            offset += part.elements
        return buffer[:offset]

    return read


def apply_means(
    tensors: SharedTensors,
    layout: Layout,
    mean: Callable[[int, Tensor], None],
    outer: OuterCoefficients,
    *,
    average: bool,
) -> None:
    """Take the outer step with each chunk's mean, which `mean(i, out)` writes; `average`: move to the mean itself."""
    buffer = _buffer(layout)
    for index, chunk in enumerate(layout.chunks):
        agreed, offset = buffer[: chunk.elements], 0
        mean(index, agreed)
        for part in chunk.parts:
            tensors.apply(
                layout,
                part,
                agreed[offset : offset + part.elements],
                lr=outer.lr,
                momentum=outer.momentum,
                divisor=outer.divisor,
                average=average,
            )
            offset += part.elements
