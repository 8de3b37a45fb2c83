"""The mean of one chunk: what it is, for whom, and when there is none."""

from __future__ import annotations

import math

import pytest
import torch

from composer_replication.collective.codec import CODECS, decode_chunk, encode_chunk, read_fields
from composer_replication.collective.norms import square_norm
from composer_replication.collective.reduce import parameter_square_norm, reduce_chunk, shares
from composer_replication.errors import ObjectCorrupt

FLT_MAX = torch.finfo(torch.float32).max
SIZES = [3, 5000, 40]


def encoded(codec: str, count: int) -> tuple[list[torch.Tensor], list[bytes]]:
    generator = torch.Generator().manual_seed(count)
    values = [torch.randn(sum(SIZES), generator=generator) for _ in range(count)]
    return values, [bytes(encode_chunk(codec, SIZES, v)) for v in values]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_mean_of_the_decoded(codec: str, count: int) -> None:
    _, payloads = encoded(codec, count)
    reduced = reduce_chunk(codec, SIZES, payloads, [1.0] * count)
    total = decode_chunk(codec, SIZES, payloads[0])
    for payload in payloads[1:]:
        total = total + decode_chunk(codec, SIZES, payload)
    right = encode_chunk(codec, SIZES, total / torch.tensor([float(count)]))
    assert reduced.finite and reduced.payload == right
    assert reduced.square_norm == square_norm(decode_chunk(codec, SIZES, right))


def test_weights() -> None:
    values, payloads = encoded("float32", 3)
    reduced = reduce_chunk("float32", SIZES, payloads, [1.0, 2.0, 5.0])
    mean = decode_chunk("float32", SIZES, reduced.payload)
    right = sum(v.double() * w for v, w in zip(values, (1.0, 2.0, 5.0), strict=True)) / 8
    # Three products and two sums in float32 of values below 5.
    torch.testing.assert_close(mean.double(), right, rtol=0, atol=5 * 5 * 2.0**-24)
    # Equal weights, whatever they are, are the plain mean, bit for bit.
    plain = reduce_chunk("float32", SIZES, payloads, [1.0, 1.0, 1.0]).payload
    assert reduce_chunk("float32", SIZES, payloads, [0.3, 0.3, 0.3]).payload == plain
    assert reduce_chunk("float32", SIZES, payloads, [0.0, 0.0, 0.0]).payload == plain
    assert shares([1.0, 3.0]) == (0.25, 0.75)
    assert shares([0.0, 3.0]) == (0.0, 1.0)
    for bad in ([], [1.0, -1.0], [1.0, math.nan], [1.0, math.inf]):
        with pytest.raises(ValueError, match="weights must be finite, not negative"):
            shares(bad)


def test_the_norm_leaves_buffers_out() -> None:
    values = torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(9))
    first, middle, last = values.split(SIZES)
    norm = parameter_square_norm
    assert norm(values, SIZES, None) == norm(values, SIZES, [True] * 3) == square_norm(values)
    assert norm(values, SIZES, [True, False, True]) == square_norm(first) + square_norm(last)
    assert norm(values, SIZES, [False, True, False]) == square_norm(middle)
    assert norm(values, SIZES, [True, True, False]) == square_norm(values[:5003])
    assert norm(values, SIZES, [False] * 3) == 0.0
    payload = encode_chunk("float32", SIZES, values)
    reduced = reduce_chunk("float32", SIZES, [payload], [1.0], parameters=[False, True, True])
    assert reduced.square_norm == square_norm(values[3:])


@pytest.mark.parametrize("codec", CODECS)
def test_a_sum_that_overflows_is_told(codec: str) -> None:
    payloads = [encode_chunk(codec, [2], torch.tensor([FLT_MAX, 1.0]))] * 2
    reduced = reduce_chunk(codec, [2], payloads, [1.0, 1.0])
    assert not reduced.finite and reduced.payload == b"" and math.isnan(reduced.square_norm)
    assert reduce_chunk(codec, [2], payloads[:1], [1.0]).finite


def test_a_contribution_that_is_not_finite_is_told() -> None:
    """A replica that lies about its values can't poison the mean."""
    payload = encode_chunk("float32", [2], torch.tensor([1.0, 2.0]))
    payload[-4:] = b"\x00\x00\xc0\x7f"  # NaN
    assert not reduce_chunk("float32", [2], [payload, payload], [1.0, 1.0]).finite


def test_payloads_come_one_at_a_time() -> None:
    _, payloads = encoded("int8", 4)
    alive: list[int] = []

    def stream():
        for index, payload in enumerate(payloads):
            alive.append(index)
            yield payload

    assert reduce_chunk("int8", SIZES, stream(), [1.0] * 4) == reduce_chunk("int8", SIZES, payloads, [1.0] * 4)
    assert alive == [0, 1, 2, 3]
    for weights in ([1.0] * 3, [1.0] * 5):
        with pytest.raises(ValueError, match="payloads, got"):
            reduce_chunk("int8", SIZES, payloads, weights)
    with pytest.raises(ObjectCorrupt):
        reduce_chunk("int8", SIZES, [payloads[0], payloads[1][:-1]], [1.0, 1.0])


def test_fields_go_into_the_mean() -> None:
    _, payloads = encoded("int8", 2)
    reduced = reduce_chunk("int8", SIZES, payloads, [1.0, 1.0], fields={"round": 7})
    assert read_fields(reduced.payload) == {"round": 7}
