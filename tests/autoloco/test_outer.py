"""Outer coefficients: by hand, and at rho = 1 exactly DiLoCo's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.autoloco import OuterConfig, mass_ratio, outer_coefficients

# Rounding of a handful of double operations.
CLOSE = 1e-12


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("mass", [1e-9, 0.1 + 0.2, 3.0, 1e6])
@pytest.mark.parametrize("normalize", [False, True])
def test_the_base_interval_gets_the_base_coefficients_bit_for_bit(
    momentum: float, mass: float, normalize: bool
) -> None:
    config = OuterConfig(lr=0.7, normalize=normalize)
    for base_mass in (mass, 2 * mass):  # a shorter interval counts as a whole one
        got = outer_coefficients(config, momentum, mass, base_mass)
        assert (got.rho, got.momentum, got.lr, got.divisor) == (1.0, momentum, 0.7, 1.0)


def test_by_hand_at_one_and_a_half_base_intervals() -> None:
    got = outer_coefficients(OuterConfig(max_scale=None), 0.7, 30.0, 20.0)
    assert got.rho == 1.5
    assert got.momentum == pytest.approx(0.585662018573853, rel=CLOSE)  # 0.7 ** 1.5
    # 0.7 * 1.5 * (1 - 0.585662018573853) / 0.3
    assert got.lr == pytest.approx(1.4501829349915145, rel=CLOSE)
    assert got.divisor == 1.0


def test_the_outer_step_is_bounded() -> None:
    assert outer_coefficients(OuterConfig(), 0.7, 30.0, 20.0).lr == pytest.approx(0.7 * 1.5, rel=CLOSE)
    # 1.1 * (1 - 0.7 ** 1.1) / 0.3 = 1.19 is below the bound of 1.5
    assert outer_coefficients(OuterConfig(), 0.7, 22.0, 20.0).lr == pytest.approx(0.83, abs=0.01)
    assert outer_coefficients(OuterConfig(max_scale=1.0), 0.7, 22.0, 20.0).lr == 0.7


def test_momentum_is_clipped_and_the_step_follows_the_clipped_one() -> None:
    got = outer_coefficients(OuterConfig(max_scale=None), 0.7, 3.0, 1.0)  # 0.7 ** 3 = 0.343
    assert (got.momentum, got.lr) == (0.5, pytest.approx(0.7 * 3.0 * 0.5 / 0.3, rel=CLOSE))
    high = outer_coefficients(OuterConfig(momentum_max=0.95), 0.99, 1.5, 1.0)  # 0.99 ** 1.5 = 0.985
    assert high.momentum == pytest.approx(0.99**1.5, rel=CLOSE)


def test_a_base_momentum_outside_the_bounds_stays_what_it_is() -> None:
    got = outer_coefficients(OuterConfig(max_scale=None), 0.0, 1.25, 1.0)
    assert (got.momentum, got.lr) == (0.0, 0.7 * 1.25)
    assert outer_coefficients(OuterConfig(), 0.3, 2.0, 1.0).momentum == 0.3


def test_normalisation_divides_by_rho_and_is_independent_of_the_rest() -> None:
    plain, normal = (outer_coefficients(OuterConfig(normalize=on), 0.7, 3.0, 2.0) for on in (False, True))
    assert (plain.divisor, normal.divisor) == (1.0, 1.5)
    assert (plain.momentum, plain.lr) == (normal.momentum, normal.lr)


def test_each_adjustment_can_be_switched_off() -> None:
    still = outer_coefficients(OuterConfig(adapt_momentum=False, adapt_lr=False), 0.7, 3.0, 2.0)
    assert (still.rho, still.momentum, still.lr) == (1.5, 0.7, 0.7)
    momentum_only = outer_coefficients(OuterConfig(adapt_lr=False), 0.7, 3.0, 2.0)
    assert (momentum_only.momentum, momentum_only.lr) == (pytest.approx(0.7**1.5), 0.7)
    step_only = outer_coefficients(OuterConfig(adapt_momentum=False, max_scale=None), 0.7, 3.0, 2.0)
    assert (step_only.momentum, step_only.lr) == (0.7, pytest.approx(0.7 * 1.5, rel=CLOSE))


def test_averaging_is_a_step_of_one_without_momentum_whatever_the_masses() -> None:
    got = outer_coefficients(OuterConfig(kind="average", normalize=True), 0.9, 3.0, 2.0)
    assert (got.rho, got.momentum, got.lr, got.divisor) == (1.0, 0.0, 1.0, 1.0)


@pytest.mark.parametrize("mass,base_mass", [(0.0, 0.0), (1.0, 0.0), (float("nan"), 1.0), (1.0, float("inf"))])
def test_without_a_base_mass_there_is_no_correction(mass: float, base_mass: float) -> None:
    assert mass_ratio(mass, base_mass) == 1.0


@given(
    st.floats(1e-6, 1e3),
    st.floats(1.0, 3.0),
    st.floats(0.0, 0.99),
    st.booleans(),
)
def test_properties(base_mass: float, ratio: float, momentum: float, normalize: bool) -> None:
    config = OuterConfig(max_scale=None, momentum_min=0.0, momentum_max=0.99, normalize=normalize)
    got = outer_coefficients(config, momentum, base_mass * ratio, base_mass)
    assert got.rho >= 1.0 and 0.0 <= got.momentum <= momentum
    # Steady state of a constant input: lr / (1 - momentum) grows in proportion to rho ...
    assert got.lr / (1 - got.momentum) == pytest.approx(got.rho * 0.7 / (1 - momentum), rel=1e-9)
    if normalize:  # ... which normalisation cancels (paper, section 4.3)
        assert got.lr / got.divisor / (1 - got.momentum) == pytest.approx(0.7 / (1 - momentum), rel=1e-9)
    bounded = outer_coefficients(OuterConfig(max_scale=1.5), momentum, base_mass * ratio, base_mass)
    assert 0.7 <= bounded.lr * (1 + CLOSE) and bounded.lr <= 0.7 * 1.5 * (1 + CLOSE)
