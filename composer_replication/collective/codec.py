"""How a chunk of float32 values becomes bytes, and back: float32, bfloat16, and the paper's INT8 (appendix G.1).

Invariant: encoding is a function of the values alone, and whoever decodes gets the same bits. Nothing that comes out
of a buffer is trusted: every length is checked against what the caller expects before anything is allocated, and
nothing in a header is executed, imported or used as a path.

Wire format, little-endian:

    offset 0   8 bytes  magic b"CRCHUNK\\0"
           8   uint16   wire version
          10   uint16   zero
          12   uint32   length of the header
          16   header   JSON object {"codec": name, "parts": [elements, ...], "fields": {...}}, ASCII
               zeros up to the next multiple of 64, then the raw buffers:
               float32, bfloat16: the values
               int8: the scales (float32, one a block), zeros up to the next multiple of 64, then the int8 values

Error of one encoding, for each element x: float32 none; bfloat16 |x| * 2**-8, or 2**-134 where that is more (values
that would round to infinity become the greatest bfloat16); int8 half a scale (the scale is max|x| / 127 of the
block, or the least normal float32 if that is more), up to float32 rounding.
"""

from __future__ import annotations

import difflib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
import xxhash
from torch import Tensor

from composer_replication.collective.blocks import (
    INT8_BLOCK,
    INT8_MAX_SCALE,
    INT8_MIN_SCALE,
    add_decoded_,
    decode_into,
    encode_into,
)
from composer_replication.errors import ObjectCorrupt
from composer_replication.store.base import Buffer

__all__ = [
    "CODECS",
    "WIRE_VERSION",
    "add_chunk_",
    "check_chunk",
    "check_codec",
    "chunk_bytes",
    "content_hash",
    "decode_chunk",
    "encode_chunk",
    "open_chunk",
    "payload_bytes",
    "read_fields",
    "try_encode_chunk",
]

CODECS = ("float32", "bfloat16", "int8")
WIRE_VERSION = 1
_MAGIC = b"CRCHUNK\0"
_PREFIX = struct.Struct("<8sHHI")
_ALIGN = 64
_MAX_FIELDS_BYTES = 4096  # a header may be larger than the one expected by this much: room for callers' fields


def check_codec(codec: str) -> str:
    """The codec's name, or ValueError with the nearest right one."""
    if codec in CODECS:
        return codec
    near = difflib.get_close_matches(str(codec), CODECS, n=1, cutoff=0.3)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"codec must be one of {', '.join(CODECS)}, got {codec!r}{hint}")


def _round_up(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _blocks(sizes: Sequence[int]) -> int:
    return sum(-(-size // INT8_BLOCK) for size in sizes)


def payload_bytes(codec: str, sizes: Sequence[int]) -> int:
    """Bytes of the raw buffers of a chunk whose parts have `sizes` elements: what has to cross, without the header."""
    check_codec(codec)
    elements = sum(sizes)
    if codec == "int8":
        return _round_up(4 * _blocks(sizes)) + elements
    return elements * (2 if codec == "bfloat16" else 4)


def _header(codec: str, sizes: Sequence[int], fields: Mapping[str, Any] | None) -> bytes:
    content = {"codec": codec, "parts": list(sizes), "fields": dict(fields or {})}
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")


def chunk_bytes(codec: str, sizes: Sequence[int], fields: Mapping[str, Any] | None = None) -> int:
    """Exact length of `encode_chunk`'s answer."""
    return _round_up(_PREFIX.size + len(_header(codec, sizes, fields))) + payload_bytes(codec, sizes)


def content_hash(buffer: Buffer) -> str:
    """xxh3_128 in hex: tells equal bytes from damaged ones. Not a signature."""
    return xxhash.xxh3_128_hexdigest(buffer)


def encode_chunk(
    codec: str,
    sizes: Sequence[int],
    values: Tensor,
    fields: Mapping[str, Any] | None = None,
    *,
    out: bytearray | None = None,
) -> bytearray:
    """Encode a chunk: a 1-D contiguous float32 CPU tensor of `sum(sizes)` elements.

    `fields` are plain JSON values for the header (run, round, replica, shard). `out` is used for the answer if it
    has the right length. Raises ValueError for an unknown codec, a tensor that doesn't fit, or a value that isn't
    finite (naming the first such part).
    """
    buffer, bad_part = try_encode_chunk(codec, sizes, values, fields, out=out)
    if bad_part is not None:
        raise ValueError(f"part {bad_part} of the chunk holds values that are not finite")
    return buffer


def try_encode_chunk(
    codec: str,
    sizes: Sequence[int],
    values: Tensor,
    fields: Mapping[str, Any] | None = None,
    *,
    out: bytearray | None = None,
) -> tuple[bytearray, int | None]:
    """`encode_chunk`, but a part that isn't finite is told by its index; the bytes are then of no use."""
    check_codec(codec)
    _check_values(values, sizes, "values")
    header = _header(codec, sizes, fields)
    if len(header) > _header_limit(codec, sizes):
        raise ValueError(f"fields must fit into {_MAX_FIELDS_BYTES} bytes of JSON, got a header of {len(header)} bytes")
    begin = _round_up(_PREFIX.size + len(header))
    total = begin + payload_bytes(codec, sizes)
    buffer = out if out is not None and len(out) == total else bytearray(total)
    _PREFIX.pack_into(buffer, 0, _MAGIC, WIRE_VERSION, 0, len(header))
    buffer[_PREFIX.size : begin] = header.ljust(begin - _PREFIX.size, b"\0")
    data, scales = _views(codec, sizes, buffer, begin)
    return buffer, encode_into(values, sizes, data, scales)


def check_chunk(codec: str, sizes: Sequence[int], buffer: Buffer, fields: Mapping[str, Any] | None = None) -> int:
    """Check everything about a buffer but its raw values; gives the offset of these. Allocates nothing big.

    Every field in `fields` must be in the header with that value. Raises ObjectCorrupt with the reason.
    """
    check_codec(codec)
    found, begin = _read_header(buffer, _header_limit(codec, sizes))
    if found["codec"] != codec:
        raise ObjectCorrupt(f"the chunk is encoded as {str(found['codec'])[:40]!r}, expected {codec!r}")
    if found["parts"] != list(sizes):
        raise ObjectCorrupt("the chunk's parts have other sizes than expected")
    total = begin + payload_bytes(codec, sizes)
    size = memoryview(buffer).nbytes
    if size != total:
        raise ObjectCorrupt(f"the chunk has {size} bytes, expected {total}")
    for name, value in (fields or {}).items():
        if name not in found["fields"] or found["fields"][name] != value:
            got = str(found["fields"].get(name))[:80]
            raise ObjectCorrupt(f"the chunk's {name} is {got!r}, expected {value!r}")
    return begin


def read_fields(buffer: Buffer, *, max_bytes: int = 1 << 20) -> dict[str, Any]:
    """The caller's fields in a chunk's header, as found: data to compare, never to act on. Raises ObjectCorrupt."""
    return _read_header(buffer, max_bytes)[0]["fields"]


def decode_chunk(
    codec: str,
    sizes: Sequence[int],
    buffer: Buffer,
    *,
    fields: Mapping[str, Any] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Decode a chunk into `out`, or into a new 1-D float32 CPU tensor. Raises ObjectCorrupt if anything is amiss."""
    begin = check_chunk(codec, sizes, buffer, fields)
    if out is None:
        out = torch.empty(sum(sizes), dtype=torch.float32)
    _check_values(out, sizes, "out")
    data, scales = _views(codec, sizes, buffer, begin)
    _check_scales(scales)
    decode_into(out, sizes, data, scales)
    return out


def add_chunk_(
    codec: str, sizes: Sequence[int], buffer: Buffer, total: Tensor, *, fields: Mapping[str, Any] | None = None
) -> None:
    """`total += decode(buffer)`, elementwise in float32, block by block while the values are in cache."""
    begin = check_chunk(codec, sizes, buffer, fields)
    _check_values(total, sizes, "total")
    data, scales = _views(codec, sizes, buffer, begin)
    _check_scales(scales)
    add_decoded_(total, sizes, data, scales)


def open_chunk(codec: str, sizes: Sequence[int], buffer: Buffer) -> tuple[Tensor, Tensor | None]:
    """A chunk's data and scales, checked but not decoded: views of `buffer`, which they keep. Raises ObjectCorrupt."""
    begin = check_chunk(codec, sizes, buffer)
    data, scales = _views(codec, sizes, buffer, begin)
    _check_scales(scales)
    return data, scales


def _check_values(values: Tensor, sizes: Sequence[int], name: str) -> None:
    fits = values.dim() == 1 and values.dtype == torch.float32 and values.device.type == "cpu"
    if not (fits and values.is_contiguous() and values.numel() == sum(sizes)):
        raise ValueError(
            f"{name} must be a contiguous 1-D float32 CPU tensor of {sum(sizes)} elements,"
            f" got {values.dtype} of shape {list(values.shape)} on {values.device}"
        )


def _header_limit(codec: str, sizes: Sequence[int]) -> int:
    return len(_header(codec, sizes, None)) + _MAX_FIELDS_BYTES


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _read_header(buffer: Buffer, limit: int) -> tuple[dict[str, Any], int]:
    size = memoryview(buffer).nbytes
    if size < _PREFIX.size:
        raise ObjectCorrupt(f"a chunk of {size} bytes is too short to have a header")
    magic, version, reserved, length = _PREFIX.unpack_from(buffer, 0)
    if magic != _MAGIC:
        raise ObjectCorrupt("the bytes don't begin as a chunk does")
    if version != WIRE_VERSION or reserved != 0:
        raise ObjectCorrupt(f"the chunk has wire version {version}.{reserved}, expected {WIRE_VERSION}.0")
    if length > limit:
        raise ObjectCorrupt(f"the chunk's header claims {length} bytes, at most {limit} are expected")
    begin = _round_up(_PREFIX.size + length)
    if begin > size:
        raise ObjectCorrupt(f"the chunk's header claims {length} bytes, the chunk has {size}")
    text = bytes(memoryview(buffer)[_PREFIX.size : _PREFIX.size + length])
    try:
        found: Any = json.loads(text.decode("ascii"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise ObjectCorrupt("the chunk's header is not JSON") from None
    if not isinstance(found, dict) or cast("dict[str, Any]", found).keys() != {"codec", "parts", "fields"}:
        raise ObjectCorrupt("the chunk's header has not the keys codec, parts and fields")
    content = cast("dict[str, Any]", found)
    if not isinstance(content["fields"], dict):
        raise ObjectCorrupt("the chunk's fields are not a JSON object")
    return content, begin


class _Shared:
    """Lends a buffer's bytes to numpy without a copy. The tensors made from it keep the buffer alive.

    `torch.frombuffer` warns about read-only buffers such as `bytes`; the ones that come in here are only read.
    """

    def __init__(self, buffer: Buffer) -> None:
        array = np.frombuffer(buffer, dtype=np.uint8)
        self._keep = array
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": array.shape,
            "data": (array.ctypes.data, False),
        }


def _views(codec: str, sizes: Sequence[int], buffer: Buffer, begin: int) -> tuple[Tensor, Tensor | None]:
    """The raw buffers as tensors over the buffer's own memory: data, and scales if the codec has them."""
    elements = sum(sizes)
    if elements == 0:
        return torch.empty(0, dtype=torch.float32), None
    shared = np.asarray(_Shared(buffer))
    if codec != "int8":
        dtype = torch.float32 if codec == "float32" else torch.bfloat16
        return torch.frombuffer(shared, dtype=dtype, count=elements, offset=begin), None
    blocks = _blocks(sizes)
    scales = torch.frombuffer(shared, dtype=torch.float32, count=blocks, offset=begin)
    data = torch.frombuffer(shared, dtype=torch.int8, count=elements, offset=begin + _round_up(4 * blocks))
    return data, scales


def _check_scales(scales: Tensor | None) -> None:
    # The encoder writes none outside of this range, in which decoded values stay finite. NaN fails the comparison too.
    if scales is not None:
        low, high = torch.aminmax(scales)
        if not (low.item() >= INT8_MIN_SCALE and high.item() <= INT8_MAX_SCALE):
            raise ObjectCorrupt("the chunk holds an int8 scale out of range")
