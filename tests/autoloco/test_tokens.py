"""From token-equivalent horizons to steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.autoloco import AutoLoCoConfig
from composer_replication.autoloco.tokens import TokenMapper, nearest
from tests.autoloco.observations import observation

CONFIG = AutoLoCoConfig(base_horizon=30, horizon_step=3)


def after(*densities: float | None, roster: int = 4, steps: int = 30) -> TokenMapper:
    mapper = TokenMapper()
    for density in densities:
        tokens = None if density is None else round(density * steps * roster)
        mapper = mapper.observe(CONFIG, observation(roster=roster, steps=steps * roster, tokens=tokens), at_base=True)
    return mapper


@pytest.mark.parametrize("target,expected", [(0, 10), (14.9, 10), (15, 10), (15.1, 20), (25, 20), (30, 30), (99, 30)])
def test_nearest_takes_the_smaller_of_two_equally_close(target: float, expected: int) -> None:
    assert nearest((10, 20, 30), target) == expected


def test_a_horizon_is_its_own_number_of_steps_until_three_intervals_are_counted() -> None:
    assert after(100, 200).steps(CONFIG, 33) == 33
    assert after(None, None, None, None).steps(CONFIG, 33) == 33
    assert after(100, None, 100).steps(CONFIG, 33) == 33
    assert not after(100, 100).calibrated and after(100, 100, 100).calibrated


def test_the_median_of_three_and_a_slow_estimate() -> None:
    mapper = after(100, 400, 200)
    # estimate 0.9 * (0.9 * 100 + 40) + 20 = 137; the median is 200 a step: 30 * 200 / 137 = 43.8; grid 42, 45
    assert mapper.rate == pytest.approx(137.0)
    assert mapper.steps(CONFIG, 30) == 45
    assert after(100, 400, 200, 5000).base_intervals == mapper.base_intervals  # the first three only


def test_only_base_intervals_calibrate_but_every_interval_is_averaged() -> None:
    mapper = after(100, 100)
    other = mapper.observe(CONFIG, observation(steps=120, tokens=24000), at_base=False)
    assert other.base_intervals == mapper.base_intervals
    assert other.rate == pytest.approx(110.0)


def test_a_change_of_roster_changes_nothing() -> None:
    small, large = after(100, 90, 80, roster=2), after(100, 90, 80, roster=7)
    assert small == large


def test_what_is_not_counted_teaches_nothing() -> None:
    mapper = after(100, 100)
    for seen in (observation(tokens=None), observation(tokens=0), observation(tokens=50, steps=0)):
        assert mapper.observe(CONFIG, seen, at_base=True) == mapper


def test_thin_batches_stretch_an_interval_to_the_grids_end_and_no_further() -> None:
    mapper = replace(after(100, 100, 100), rate=1e-3)
    assert mapper.steps(CONFIG, 30) == CONFIG.grid[-1] == 180
    assert replace(mapper, rate=1e9).steps(CONFIG, 30) == CONFIG.grid[0] == 3


@given(st.floats(1e-6, 1e9), st.integers(0, 10), st.lists(st.integers(1, 10**9), min_size=3, max_size=3))
def test_steps_are_a_positive_member_of_the_grid(rate: float, index: int, tokens: list[int]) -> None:
    mapper = TokenMapper(base_intervals=tuple(float(one) for one in tokens), rate=rate)
    horizon = CONFIG.horizons[index]
    assert mapper.steps(CONFIG, horizon) in CONFIG.grid
    assert mapper.steps(CONFIG, horizon) >= mapper.steps(CONFIG, CONFIG.horizons[0])
