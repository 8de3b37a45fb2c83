"""Norms in a fixed order: right to the last bits, and equal to the order written down."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from composer_replication.collective.norms import LANES, all_finite, difference_square_norm, square_norm

FLT_MAX = torch.finfo(torch.float32).max
SUBNORMAL = 2.0**-149
LENGTHS = [1, 2, 3, 7, 4096, 5000, LANES - 1, LANES, LANES + 1, 3 * LANES + 17]


def by_the_book(values: torch.Tensor) -> float:
    """Element k to lane k mod LANES, lanes in order, then halves onto halves: always with all the lanes."""
    squares = values.double().numpy() ** 2
    lanes = np.zeros(LANES)
    for begin in range(0, len(squares), LANES):
        block = squares[begin : begin + LANES]
        lanes[: len(block)] += block
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return float(lanes[0])


@pytest.mark.parametrize("length", LENGTHS)
def test_bits_are_those_of_the_order_written_down(length: int) -> None:
    values = torch.randn(length, generator=torch.Generator().manual_seed(length))
    got = square_norm(values)
    assert got == by_the_book(values)
    # float64 sums of positive terms: each lane adds a few terms and 17 halvings follow, each off by 2**-53 at most.
    assert got == pytest.approx(math.fsum((values.double() ** 2).tolist()), rel=30 * 2.0**-53)


@pytest.mark.parametrize("length", LENGTHS)
def test_of_a_difference(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    start, local = torch.randn(length, generator=generator), torch.randn(length, generator=generator)
    assert difference_square_norm(start, local) == square_norm(start - local)
    assert difference_square_norm(start, start) == 0.0


def test_extremes() -> None:
    assert square_norm(torch.zeros(0)) == 0.0
    assert square_norm(torch.tensor([SUBNORMAL])) == 2.0**-298
    assert square_norm(torch.full((4,), FLT_MAX)) == 4.0 * float(FLT_MAX) ** 2
    assert difference_square_norm(torch.tensor([FLT_MAX]), torch.tensor([-FLT_MAX])) == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, LANES - 1, LANES, 2 * LANES + 4])
def test_not_finite(bad: float, where: int) -> None:
    values = torch.full((2 * LANES + 5,), FLT_MAX)
    assert math.isfinite(square_norm(values)) and all_finite(values)
    values[where] = bad
    assert not math.isfinite(square_norm(values))
    assert not all_finite(values)
    assert all_finite(values[:where]) and all_finite(values[where + 1 :])


def test_misuse() -> None:
    with pytest.raises(ValueError, match="1-D float32"):
        square_norm(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="1-D float32"):
        square_norm(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="start has shape"):
        difference_square_norm(torch.zeros(2), torch.zeros(3))
