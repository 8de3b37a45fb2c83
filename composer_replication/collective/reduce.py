"""The mean of one chunk over a roster: decode, add in roster order, divide, encode once. Or a robust mean of it.

Invariant: the mean is what its committed bytes decode to. Whoever reduces uses that too, never its own float32 sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from composer_replication.collective.blocks import trimmed_mean_into
from composer_replication.collective.codec import add_chunk_, decode_chunk, open_chunk, try_encode_chunk
from composer_replication.collective.layout import Chunk, Layout
from composer_replication.collective.norms import square_norm
from composer_replication.store.base import Buffer

__all__ = [
    "ReducedChunk",
    "factors",
    "parameter_parts",
    "parameter_square_norm",
    "part_sizes",
    "reduce_chunk",
    "shares",
]


@dataclass(frozen=True, slots=True)
class ReducedChunk:
    """`payload` is the encoded mean; `square_norm` is that of the decoded mean over the parameter parts.

    Not `finite`: the sum overflowed, or a contribution wasn't finite. The payload is empty then; the caller voids it.
    """

    payload: bytearray
    square_norm: float
    finite: bool


def part_sizes(chunk: Chunk) -> tuple[int, ...]:
    """Elements of each part of a chunk: what the codecs want to know."""
    return tuple(part.elements for part in chunk.parts)


def parameter_parts(layout: Layout, chunk: Chunk) -> tuple[bool, ...]:
    """For each part of a chunk, whether it belongs to a parameter (norms leave buffers out)."""
    return tuple(layout.slots[part.slot].kind == "parameter" for part in chunk.parts)


def shares(weights: Sequence[float]) -> tuple[float, ...] | None:
    """Each weight's part of their sum, rounded to float32; None when all are equal (0 too): the mean is plain then."""
    if not weights or not all(0.0 <= weight < math.inf for weight in weights):
        raise ValueError(f"weights must be finite, not negative and at least one, got {tuple(weights)}")
    if all(weight == weights[0] for weight in weights):
        return None
    total = 0.0
    for weight in weights:  # in roster order: `sum` of floats adds in another way from Python 3.12 on
        total += weight
    return tuple(float(np.float32(weight / total)) for weight in weights)


def parameter_square_norm(values: Tensor, sizes: Sequence[int], parameters: Sequence[bool] | None) -> float:
    """Squared norm over the parameter parts, run by run: neighbouring parameter parts count as one stretch."""
    if parameters is None or all(parameters):
        return square_norm(values)
    total = 0.0
    begin = end = 0
    for size, wanted in zip(sizes, parameters, strict=True):
        if not wanted:
            total += square_norm(values[begin:end])
            begin = end + size
        end += size
    return total + square_norm(values[begin:end])


def factors(weights: Sequence[float], scales: Sequence[float] | None) -> tuple[float, ...] | None:
    """What each member's decoded values are multiplied by, once, in float32; None: by nothing.

    `scales` are float32 factors of outliers (membership.treat), 1 for all others. With equal weights the sum is
    divided afterwards; otherwise the shares are in the factors.
    """
    parts = shares(weights)
    if scales is None:
        return parts
    if len(scales) != len(weights):
        raise ValueError(f"expected {len(weights)} scales, got {len(scales)}")
    if parts is None:
        return tuple(float(np.float32(scale)) for scale in scales)
    return tuple(float(np.float32(part * scale)) for part, scale in zip(parts, scales, strict=True))


def reduce_chunk(
    codec: str,
    sizes: Sequence[int],
    payloads: Iterable[Buffer],
    weights: Sequence[float],
    *,
    scales: Sequence[float] | None = None,
    trim: int | None = None,
    parameters: Sequence[bool] | None = None,
    fields: dict[str, object] | None = None,
) -> ReducedChunk:
    """Average the encoded chunks of a roster.

    `payloads` come in roster order, one for each weight, and may be fetched one at a time: what is held is one chunk's
    float32 sum, whatever the roster's size. Equal weights: the sum divided by their number. Otherwise each decoded
    contribution is multiplied by its share first. `scales`: a further float32 factor of each member. `trim`: not the
    mean but the trimmed mean without that many values at each end, coordinate by coordinate, in which every member
    counts alike, whatever its weight (the median, if that leaves one or two); all payloads are then held, still
    encoded, and decoded block by block. `parameters` tells for each part whether the norm covers it (None: all).
    `fields` go into the header of the mean. Raises ObjectCorrupt for a payload that isn't such a chunk, and ValueError
    for weights that are negative or not finite, or payloads that are too few or too many.
    """
    total = torch.empty(sum(sizes), dtype=torch.float32)
    if trim is None:
        _mean_into(total, codec, sizes, payloads, weights, scales)
    else:
        if not 0 <= 2 * trim < len(weights):
            raise ValueError(f"trim must leave some of {len(weights)} values, got {trim}")
        if scales is not None and len(scales) != len(weights):
            raise ValueError(f"expected {len(weights)} scales, got {len(scales)}")
        # Checked as they come, so that the caller knows whose isn't what it should be.
        chunks = [open_chunk(codec, sizes, payload) for payload in _counted(payloads, len(weights))]
        trimmed_mean_into(total, sizes, chunks, scales, trim)
        del chunks
    payload, bad_part = try_encode_chunk(codec, sizes, total, fields)
    if bad_part is not None:
        return ReducedChunk(bytearray(), float("nan"), False)
    decode_chunk(codec, sizes, payload, out=total)
    return ReducedChunk(payload, parameter_square_norm(total, sizes, parameters), True)


def _mean_into(
    total: Tensor,
    codec: str,
    sizes: Sequence[int],
    payloads: Iterable[Buffer],
    weights: Sequence[float],
    scales: Sequence[float] | None,
) -> None:
    multiply = factors(weights, scales)
    scratch: Tensor | None = None
    count = 0
    for payload in _counted(payloads, len(weights)):
        factor = 1.0 if multiply is None else multiply[count]
        if count == 0:
            decode_chunk(codec, sizes, payload, out=total)
            if factor != 1.0:
                total.mul_(factor)
        elif factor == 1.0:
            add_chunk_(codec, sizes, payload, total)
        else:
            scratch = torch.empty_like(total) if scratch is None else scratch
            total.add_(decode_chunk(codec, sizes, payload, out=scratch).mul_(factor))
        count += 1
    if shares(weights) is None and count > 1:
        total.div_(torch.full((1,), float(count)))  # a tensor, not a number: see the codec


def _counted(payloads: Iterable[Buffer], wanted: int) -> Iterator[Buffer]:
    count = 0
    for payload in payloads:
        if count == wanted:
            raise ValueError(f"expected {wanted} payloads, got more")
        count += 1
        yield payload
    if count != wanted:
        raise ValueError(f"expected {wanted} payloads, got {count}")
