"""The codecs' arithmetic, in blocks that stay in cache.

Invariant: elementwise operations and maxima only, each rounded once, so that neither the block's size, the number of
threads nor the instruction set changes a bit.

`data` tells the codec by its dtype: float32, bfloat16, or int8 (which comes with `scales`, one for each run of up to
4,096 elements of a part).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from composer_replication.collective.norms import all_finite
from composer_replication.collective.scratch import scratch

__all__ = ["INT8_BLOCK", "INT8_MAX_SCALE", "INT8_MIN_SCALE", "add_decoded_", "decode_into", "encode_into"]

INT8_BLOCK = 4096
INT8_MIN_SCALE = 2.0**-126  # the least normal float32: a subnormal scale would lose its precision, or be zero
INT8_MAX_SCALE = float.fromhex("0x1.020406p+121")  # the float32 below FLT_MAX / 127: times 127 it is still finite
_BFLOAT16_MAX = float.fromhex("0x1.fep+127")
_ROWS = 64  # 64 rows of 4,096 float32 are 1 MiB; several times as fast as blocks of 8 rows
_STRIDE = _ROWS * INT8_BLOCK


def _spans(sizes: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Where each block of rows lies: part, begin, end, first scale. All but a part's last row are whole."""
    begin = scale = 0
    for part, size in enumerate(sizes):
        whole = size - size % INT8_BLOCK
        for offset in range(0, whole, _STRIDE):
            take = min(_STRIDE, whole - offset)
            yield part, begin + offset, begin + offset + take, scale
            scale += take // INT8_BLOCK
        if whole < size:
            yield part, begin + whole, begin + size, scale
            scale += 1
        begin += size


def _rows(values: Tensor, begin: int, end: int) -> Tensor:
    width = min(INT8_BLOCK, end - begin)
    return values[begin:end].view(-1, width)


def _room(elements: int) -> Tensor:
    return scratch("codec", min(_STRIDE, elements), torch.float32)


def encode_into(values: Tensor, sizes: Sequence[int], data: Tensor, scales: Tensor | None) -> int | None:
    """Write the encoded values into `data` and `scales`. Gives the index of the first part that isn't finite."""
    values = values.detach()
    if scales is not None:
        return _encode_int8(values, sizes, data, scales)
    begin = 0
    for part, size in enumerate(sizes):
        if not all_finite(values[begin : begin + size]):
            return part
        begin += size
    if data.dtype == torch.bfloat16:
        room = _room(values.numel())
        for begin in range(0, values.numel(), _STRIDE):
            block = values[begin : begin + _STRIDE]
            bounded = torch.clamp(block, -_BFLOAT16_MAX, _BFLOAT16_MAX, out=room[: block.numel()])
            data[begin : begin + _STRIDE].copy_(bounded)
    else:
        data.copy_(values)
    return None


def _encode_int8(values: Tensor, sizes: Sequence[int], data: Tensor, scales: Tensor) -> int | None:
    spare = _room(max(sizes, default=0))
    peaks = torch.empty_like(scales)
    # A tensor, not a number: some devices multiply by the reciprocal of a number instead of dividing by it.
    most = torch.tensor(127.0)
    for _, begin, end, first in _spans(sizes):
        block = _rows(values, begin, end)
        room = spare[: end - begin].view(block.shape)
        last = first + len(block)
        torch.abs(block, out=room)
        peak = torch.amax(room, dim=1, out=peaks[first:last])
        scale = torch.div(peak, most, out=scales[first:last]).clamp_(INT8_MIN_SCALE, INT8_MAX_SCALE)
        # |x| / scale exceeds 127 by rounding only, which rounding to an integer takes away again: no clipping needed.
        torch.div(block, scale.unsqueeze(1), out=room)
        _rows(data, begin, end).copy_(room.round_())  # round half to even
    if not all_finite(peaks):
        return _first_bad_part(sizes, peaks)
    # Of the peak, not of the scale: a subnormal peak / 127 may have been rounded to zero.
    scales.masked_fill_(peaks == 0.0, 1.0)
    return None


def _first_bad_part(sizes: Sequence[int], peaks: Tensor) -> int:
    first = 0
    for part, size in enumerate(sizes):
        count = -(-size // INT8_BLOCK)
        if not all_finite(peaks[first : first + count]):
            return part
        first += count
    raise AssertionError("all peaks are finite")


def decode_into(out: Tensor, sizes: Sequence[int], data: Tensor, scales: Tensor | None) -> None:
    """Write the decoded values into `out`."""
    if scales is None:
        out.copy_(data)
        return
    for _, begin, end, first in _spans(sizes):
        block = _rows(out, begin, end)
        block.copy_(_rows(data, begin, end))
        block.mul_(scales[first : first + len(block)].unsqueeze(1))


def add_decoded_(total: Tensor, sizes: Sequence[int], data: Tensor, scales: Tensor | None) -> None:
    """`total += decoded`, the decoded values rounded to float32 before they are added."""
    if data.dtype == torch.float32:
        total.add_(data)
        return
    spare = _room(total.numel())
    if scales is None:
        for begin in range(0, total.numel(), _STRIDE):
            block = total[begin : begin + _STRIDE]
            block.add_(spare[: block.numel()].copy_(data[begin : begin + _STRIDE]))
        return
    for _, begin, end, first in _spans(sizes):
        block = _rows(total, begin, end)
        room = spare[: end - begin].view(block.shape)
        room.copy_(_rows(data, begin, end))
        block.add_(room.mul_(scales[first : first + len(block)].unsqueeze(1)))
