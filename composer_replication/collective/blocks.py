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

__all__ = [
    "INT8_BLOCK",
    "INT8_MAX_SCALE",
    "INT8_MIN_SCALE",
    "add_decoded_",
    "comparators",
    "decode_into",
    "encode_into",
    "trimmed_mean_into",
]

INT8_BLOCK = 4096
INT8_MIN_SCALE = 2.0**-126  # the least normal float32: a subnormal scale would lose its precision, or be zero
INT8_MAX_SCALE = float.fromhex("0x1.020406p+121")  # the float32 below FLT_MAX / 127: times 127 it is still finite
_BFLOAT16_MAX = float.fromhex("0x1.fep+127")
_ROWS = 64  # 64 rows of 4,096 float32 are 1 MiB; several times as fast as blocks of 8 rows
_STRIDE = _ROWS * INT8_BLOCK
_SORTED_ROWS = 1024  # of all contributions together, while they are sorted: 16 MiB


def _spans(sizes: Sequence[int], stride: int = _STRIDE) -> Iterator[tuple[int, int, int, int]]:
    """Where each block of rows lies: part, begin, end, first scale. All but a part's last row are whole."""
    begin = scale = 0
    for part, size in enumerate(sizes):
        whole = size - size % INT8_BLOCK
        for offset in range(0, whole, stride):
            take = min(stride, whole - offset)
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
        _decode_span(out[begin:end], data, scales, begin, first)


def _decode_span(out: Tensor, data: Tensor, scales: Tensor | None, begin: int, first: int) -> None:
    """Decode the span that begins at `begin`, with `first` as its first scale."""
    if scales is None:
        out.copy_(data[begin : begin + out.numel()])
        return
    block = _rows(out, 0, out.numel())
    block.copy_(_rows(data, begin, begin + out.numel()))
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


def comparators(count: int) -> Iterator[tuple[int, int]]:
    """Batcher's merge exchange (Knuth, The Art of Computer Programming, 5.2.2, algorithm M): pairs (i, j), i < j,
    which sort any `count` values when each pair in turn is put into order."""
    top = 1 << max(count - 1, 0).bit_length() >> 1
    step = top
    while step:
        high, rest, distance = top, 0, step
        while distance:
            for index in range(count - distance):
                if index & step == rest:
                    yield index, index + distance
            distance, high, rest = high - step, high >> 1, step
        step >>= 1


def trimmed_mean_into(
    out: Tensor,
    sizes: Sequence[int],
    chunks: Sequence[tuple[Tensor, Tensor | None]],
    factors: Sequence[float] | None,
    trim: int,
) -> None:
    """Coordinate by coordinate, the mean of the decoded values without the `trim` least and the `trim` greatest.

    `chunks` are (data, scales) of each contribution; decoded values are multiplied by their float32 factor first, if
    there are `factors`. Values are put into order by minima and maxima, so that no algorithm of a library's decides
    about a bit, then added in ascending order and divided by their number. NaN counts as infinite: a minority can't
    spoil the mean with it.
    """
    count = len(chunks)
    stride = max(_SORTED_ROWS // (count + 1), 1) * INT8_BLOCK
    stride = min(stride, _STRIDE)
    width = min(stride, max(sizes, default=0))
    room = scratch("sorting", (count + 1) * width, torch.float32)
    pairs, kept = tuple(comparators(count)), count - 2 * trim
    divisor = torch.full((1,), float(kept))  # a tensor, not a number: see above
    for _, begin, end, first in _spans(sizes, stride):
        rows = [room[index * width : index * width + end - begin] for index in range(count + 1)]
        spare = rows.pop()
        for index, (data, scales) in enumerate(chunks):
            _decode_span(rows[index], data, scales, begin, first)
            if factors is not None and factors[index] != 1.0:
                rows[index].mul_(factors[index])
            # A minimum of 0.0 and -0.0 may be either: adding zero leaves one of them only.
            rows[index].nan_to_num_(torch.inf, torch.inf, -torch.inf).add_(0.0)
        for low, high in pairs:
            torch.minimum(rows[low], rows[high], out=spare)
            torch.maximum(rows[low], rows[high], out=rows[high])
            rows[low], spare = spare, rows[low]
        total = out[begin:end].copy_(rows[trim])
        for row in rows[trim + 1 : trim + kept]:
            total.add_(row)
        if kept > 1:
            total.div_(divisor)
