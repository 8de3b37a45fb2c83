"""Codecs: round trips within the stated bounds, sizes as computed, and bytes that must be refused."""

from __future__ import annotations

import json
import math
import pickle
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_replication.collective.blocks import INT8_BLOCK, INT8_MAX_SCALE, INT8_MIN_SCALE
from composer_replication.collective.codec import (
    CODECS,
    add_chunk_,
    check_chunk,
    chunk_bytes,
    content_hash,
    decode_chunk,
    encode_chunk,
    payload_bytes,
    read_fields,
    try_encode_chunk,
)
from composer_replication.errors import ObjectCorrupt

FLT_MAX = torch.finfo(torch.float32).max
FLT_MIN = torch.finfo(torch.float32).tiny
SUBNORMAL = 2.0**-149  # the least float32 above zero


def bound(codec: str, sizes, values: Tensor) -> Tensor:
    """The error that the module promises, element by element, in float64."""
    exact = values.double()
    if codec == "float32":
        return torch.zeros_like(exact)
    if codec == "bfloat16":
        return torch.clamp(exact.abs() * 2.0**-8, min=2.0**-134)
    bounds = []
    for part in exact.split(list(sizes)):
        for block in part.split(INT8_BLOCK) if part.numel() else ():
            # Half a scale; and a division and a product in float32, each off by 2**-24 of up to 127 scales.
            scale = max(block.abs().max().item() / 127, INT8_MIN_SCALE)
            bounds.append(torch.full_like(block, scale * (0.5 + 127 * 2.0**-22)))
    return torch.cat(bounds) if bounds else torch.zeros(0, dtype=torch.float64)


def round_trip(codec: str, sizes, values: Tensor) -> Tensor:
    encoded = encode_chunk(codec, sizes, values, {"replica": 1})
    assert len(encoded) == chunk_bytes(codec, sizes, {"replica": 1})
    decoded = decode_chunk(codec, sizes, bytes(encoded), fields={"replica": 1})
    assert decoded.shape == values.shape and decoded.dtype == torch.float32
    error = (decoded.double() - values.double()).abs()
    assert (error <= bound(codec, sizes, values)).all(), (codec, error.max())
    assert torch.isfinite(decoded).all()
    assert ((decoded == 0) | (decoded.sign() == values.sign())).all()
    assert (decoded[values == 0] == 0).all()
    return decoded


values_strategy = st.lists(
    st.one_of(
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        st.sampled_from([0.0, -0.0, 1e4, 1e-6, -1e-6, FLT_MAX, -FLT_MAX, FLT_MIN, SUBNORMAL, -3 * SUBNORMAL]),
    ),
    min_size=1,
    max_size=40,
)


@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=150, deadline=None)
@given(parts=st.lists(values_strategy, min_size=1, max_size=5))
def test_round_trip_of_anything(codec: str, parts: list[list[float]]) -> None:
    sizes = [len(part) for part in parts]
    round_trip(codec, sizes, torch.tensor([x for part in parts for x in part], dtype=torch.float32))


@pytest.mark.parametrize("codec", CODECS)
def test_round_trip_of_named_cases(codec: str) -> None:
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(300_000, generator=generator)
    spike = torch.full((10_000,), 1e-6)
    spike[4321] = 1e4
    conv = torch.randn(8, 4, 3, 3, generator=generator).permute(1, 0, 2, 3)  # not contiguous as it is
    cases = {
        "scalar": ([1], torch.tensor([-0.25])),
        "one dimension": ([300_000], normal),
        "parts": ([1, 9, 4096, 4097, 8192, 100_000], normal[: 1 + 9 + 4096 + 4097 + 8192 + 100_000]),
        "conv": ([288], conv.reshape(-1)),
        "zero": ([5000, 3], torch.zeros(5003)),
        "one 1e4 among 1e-6": ([10_000], spike),
        "subnormal": ([4096, 7], torch.full((4103,), SUBNORMAL)),
        "just below normal": ([50], torch.full((50,), FLT_MIN - SUBNORMAL)),
        "greatest": ([4096, 5], torch.full((4101,), FLT_MAX)),
        "greatest and least": ([3], torch.tensor([FLT_MAX, SUBNORMAL, -FLT_MAX])),
        "nothing": ([], torch.zeros(0)),
        "empty part": ([0, 3, 0], torch.tensor([1.0, 2.0, -4.0])),
    }
    for name, (sizes, values) in cases.items():
        decoded = round_trip(codec, sizes, values)
        if codec == "float32":
            assert torch.equal(decoded, values), name
    # The spike costs its own block's neighbours only: the other blocks keep their values.
    if codec == "int8":
        decoded = round_trip(codec, *cases["one 1e4 among 1e-6"])
        assert decoded[4321] == pytest.approx(1e4) and decoded[4097] == 0
        assert decoded[0] == pytest.approx(1e-6) and decoded[9000] == pytest.approx(1e-6)


def test_int8_is_the_papers_rule() -> None:
    """Against the rule written down plainly, in numpy: bit for bit."""
    generator = torch.Generator().manual_seed(2)
    sizes = [3, 4096, 10_000, 1]
    values = torch.randn(sum(sizes), generator=generator) * torch.logspace(-3, 3, sum(sizes))
    decoded = decode_chunk("int8", sizes, encode_chunk("int8", sizes, values)).numpy()
    expected, begin = [], 0
    for size in sizes:
        part = values[begin : begin + size].numpy()
        begin += size
        for first in range(0, size, 4096):
            block = part[first : first + 4096]
            scale = np.float32(np.abs(block).max() / np.float32(127))
            steps = np.clip(np.rint(block / scale), -127, 127).astype(np.float32)
            expected.append(steps * scale)
    assert np.array_equal(decoded, np.concatenate(expected))


def test_int8_halves_round_to_even() -> None:
    values = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5])  # the scale is exactly 1
    decoded = decode_chunk("int8", [8], encode_chunk("int8", [8], values))
    assert decoded.tolist() == [127.0, 0.0, 2.0, 2.0, 0.0, -2.0, -2.0, 126.0]


def test_int8_never_leaves_its_range() -> None:
    """The quotient by a rounded scale can exceed 127, but not by enough to round to 128."""
    generator = torch.Generator().manual_seed(3)
    peaks = torch.rand(4000, generator=generator).add_(1.0)
    peaks *= torch.pow(2.0, torch.randint(-140, 127, (4000,), generator=generator).float())
    peaks = torch.cat([peaks, torch.tensor([FLT_MAX, FLT_MIN, SUBNORMAL, 127 * FLT_MIN])])
    sizes = [1] * len(peaks)
    encoded = encode_chunk("int8", sizes, peaks)
    steps = np.frombuffer(encoded, np.int8)[-len(peaks) :]
    assert steps.min() >= 0 and steps.max() == 127
    assert torch.isfinite(decode_chunk("int8", sizes, encoded)).all()


def test_the_greatest_scale_is_the_last_one_that_is_safe() -> None:
    greatest = np.float32(INT8_MAX_SCALE)
    assert np.isfinite(np.float32(127) * greatest)
    assert greatest == np.nextafter(np.float32(FLT_MAX) / np.float32(127), np.float32(0))
    with np.errstate(over="ignore"):
        assert np.isinf(np.float32(127) * (np.float32(FLT_MAX) / np.float32(127)))


def test_bfloat16_rounds_to_even_and_never_to_infinity() -> None:
    values = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, FLT_MAX, -FLT_MAX])
    decoded = decode_chunk("bfloat16", [4], encode_chunk("bfloat16", [4], values))
    greatest = torch.finfo(torch.bfloat16).max
    assert decoded.tolist() == [1.0, 1 + 2.0**-6, greatest, -greatest]


@pytest.mark.parametrize(("codec", "right"), [("float32", 4 * 13_193), ("bfloat16", 2 * 13_193), ("int8", 64 + 13_193)])
def test_payload_bytes(codec: str, right: int) -> None:
    """Parts of 4,096, 9,000, 96 and 1 elements: 1 + 3 + 1 + 1 scales, which are padded to 64 bytes."""
    assert payload_bytes(codec, [4096, 9000, 96, 1]) == right


def test_int8_is_a_quarter_of_float32() -> None:
    sizes = [4 * 1024 * 1024]
    assert payload_bytes("int8", sizes) / payload_bytes("float32", sizes) == 0.25 + 1 / 4096
    # The header of a chunk of one large part is two or three lines of 64 bytes.
    assert chunk_bytes("int8", sizes) - payload_bytes("int8", sizes) <= 192


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(codec: str, bad: float) -> None:
    values = torch.ones(10_000)
    values[7000] = bad
    with pytest.raises(ValueError, match="part 2 of the chunk holds values that are not finite"):
        encode_chunk(codec, [100, 4000, 5000, 900], values)
    assert try_encode_chunk(codec, [7000, 3000], values)[1] == 1
    assert try_encode_chunk(codec, [7000], values[:7000].clone())[1] is None


def test_a_codec_that_is_not_there() -> None:
    for name, near in (("int-8", "int8"), ("bf16", "bfloat16"), ("fp32", "float32"), ("Float32", "float32")):
        with pytest.raises(ValueError, match=f"codec must be one of .*, got '{name}'; did you mean '{near}'"):
            encode_chunk(name, [1], torch.ones(1))
    with pytest.raises(ValueError, match="codec must be one of"):
        payload_bytes("zstd", [1])


def test_tensors_that_do_not_fit() -> None:
    for tensor in (torch.ones(3), torch.ones(2, 2), torch.ones(8)[::2], torch.ones(4, dtype=torch.float64)):
        with pytest.raises(ValueError, match="values must be a contiguous 1-D float32 CPU tensor of 4 elements"):
            encode_chunk("float32", [4], tensor)
    encoded = encode_chunk("float32", [4], torch.ones(4))
    with pytest.raises(ValueError, match="out must be"):
        decode_chunk("float32", [4], encoded, out=torch.ones(5))


@pytest.mark.parametrize("codec", CODECS)
def test_add_is_decode_then_add(codec: str) -> None:
    generator = torch.Generator().manual_seed(4)
    sizes = [5, 300_000, 4097]
    values, total = (torch.randn(sum(sizes), generator=generator) for _ in range(2))
    encoded = encode_chunk(codec, sizes, values)
    right = total + decode_chunk(codec, sizes, encoded)
    add_chunk_(codec, sizes, encoded, total)
    assert torch.equal(total, right)


def test_a_buffer_is_used_again() -> None:
    first = encode_chunk("int8", [5000], torch.ones(5000))
    again = encode_chunk("int8", [5000], torch.full((5000,), 2.0), out=first)
    assert again is first and decode_chunk("int8", [5000], again)[0] == pytest.approx(2.0)
    assert encode_chunk("int8", [5001], torch.ones(5001), out=first) is not first


def test_content_hash() -> None:
    data = encode_chunk("float32", [2], torch.ones(2))
    assert content_hash(data) == content_hash(bytes(data)) == content_hash(memoryview(data))
    assert content_hash(b"") == "99aa06d3014798d86001c324468d497f"  # the published value of XXH3-128 for no input
    data[-1] ^= 1
    assert content_hash(data) != content_hash(encode_chunk("float32", [2], torch.ones(2)))


# -- bytes that must be refused ---------------------------------------------------------------------------------------

SIZES = [5, 4099]
FIELDS = {"run": "abc", "round": 3, "replica": 1, "shard": 0}


def good(codec: str = "int8") -> bytearray:
    return encode_chunk(codec, SIZES, torch.linspace(-1, 1, sum(SIZES)), FIELDS)


def with_header(header: bytes, *, length: int | None = None) -> bytes:
    """A chunk whose header is `header`, everything else in order."""
    encoded = good()
    begin = check_chunk("int8", SIZES, encoded)
    start = struct.pack("<8sHHI", b"CRCHUNK\0", 1, 0, len(header) if length is None else length) + header
    return start.ljust(-(-len(start) // 64) * 64, b"\0") + bytes(encoded[begin:])


def content(**changes) -> bytes:
    return json.dumps({"codec": "int8", "parts": SIZES, "fields": FIELDS, **changes}).encode()


def test_a_rebuilt_chunk_is_good() -> None:
    assert decode_chunk("int8", SIZES, with_header(content()), fields=FIELDS).shape == (sum(SIZES),)
    assert read_fields(good()) == FIELDS


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "too short"),
        (b"CRCHUNK", "too short"),
        (pickle.dumps({"codec": "int8", "parts": SIZES, "fields": FIELDS}), "don't begin as a chunk"),
        (b"PK\x03\x04" + bytes(200), "don't begin as a chunk"),
        (b"CRCHUNK\0" + struct.pack("<HHI", 2, 0, 10) + bytes(100), "wire version 2.0"),
        (b"CRCHUNK\0" + struct.pack("<HHI", 1, 9, 10) + bytes(100), "wire version 1.9"),
        (b"CRCHUNK\0" + struct.pack("<HHI", 1, 0, 2**32 - 1) + bytes(100), "claims 4294967295 bytes, at most"),
        (b"CRCHUNK\0" + struct.pack("<HHI", 1, 0, 200) + bytes(100), "the chunk has 116"),
        (with_header(b"not json"), "not JSON"),
        (with_header(b'{"codec": NaN}'), "not JSON"),
        (with_header(b"\xff\xfe{}"), "not JSON"),
        (with_header(b"[" * 4000), "not JSON"),
        (with_header(b"[]"), "has not the keys"),
        (with_header(b'{"codec": "int8"}'), "has not the keys"),
        (with_header(content(extra="os.system")), "has not the keys"),
        (with_header(content(fields=["../../etc/passwd"])), "fields are not a JSON object"),
        (with_header(content(codec="float32")), "encoded as 'float32', expected 'int8'"),
        (with_header(content(codec={"__reduce__": "os.system"})), "expected 'int8'"),
        (with_header(content(codec="x" * 3000)), "expected 'int8'"),
        (with_header(content(parts=[5, 4098])), "parts have other sizes"),
        (with_header(content(parts=[10**18])), "parts have other sizes"),
        (with_header(content(parts="5,4099")), "parts have other sizes"),
        (with_header(content(fields={**FIELDS, "round": 4})), "round is '4', expected 3"),
        (with_header(content(fields={"round": 3})), "run is 'None', expected 'abc'"),
        (with_header(content(fields={**FIELDS, "run": "../../other"})), "run is '../../other', expected 'abc'"),
        (with_header(content(), length=20), "not JSON"),
        (bytes(good())[:-1], "bytes, expected"),
        (bytes(good()) + b"\0", "bytes, expected"),
        (bytes(good())[:200], "bytes, expected"),
        (bytes(good("float32")), "encoded as 'float32'"),
    ],
)
def test_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ObjectCorrupt, match=reason):
        decode_chunk("int8", SIZES, data, fields=FIELDS)
    with pytest.raises(ObjectCorrupt):
        add_chunk_("int8", SIZES, data, torch.zeros(sum(SIZES)), fields=FIELDS)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 1e-40, FLT_MAX])
def test_scales_that_the_encoder_never_writes(scale: float) -> None:
    data = good()
    begin = check_chunk("int8", SIZES, data)
    struct.pack_into("<f", data, begin + 4, scale)
    with pytest.raises(ObjectCorrupt, match="scale out of range"):
        decode_chunk("int8", SIZES, data)


def test_fields_are_only_data() -> None:
    fields = {"import": "os.system", "path": "../../etc/passwd", "nested": {"__class__": "Path"}}
    data = encode_chunk("float32", [1], torch.ones(1), fields)
    assert read_fields(data) == fields
    assert decode_chunk("float32", [1], data).tolist() == [1.0]
    with pytest.raises(ValueError, match="fields must fit into 4096 bytes"):
        encode_chunk("float32", [1], torch.ones(1), {"long": "x" * 5000})
    with pytest.raises(ValueError, match="JSON"):
        encode_chunk("float32", [1], torch.ones(1), {"bad": math.nan})


def test_every_truncation_is_refused() -> None:
    data = bytes(good())
    for length in [*range(300), len(data) - 64, len(data) - 1]:
        with pytest.raises(ObjectCorrupt):
            check_chunk("int8", SIZES, data[:length])
