"""Settings: the defaults in force, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from composer_replication.autoloco import AutoLoCoConfig, OuterConfig


@pytest.mark.parametrize(
    "base,bounds,spacing,first_step",
    [(500, (250, 750), 50, 50), (100, (50, 150), 10, 10), (20, (10, 30), 2, 2), (15, (8, 22), 1, 1), (1, (1, 1), 1, 1)],
)
def test_defaults_follow_the_base_horizon(base: int, bounds: tuple[int, int], spacing: int, first_step: int) -> None:
    config = AutoLoCoConfig(base_horizon=base)
    assert (config.shortest, config.longest) == bounds
    assert config.spacing == spacing
    assert config.horizons[0] >= bounds[0] and config.horizons[-1] <= bounds[1]
    assert base in config.horizons
    assert config.grid[0] == first_step and set(config.horizons) <= set(config.grid)
    assert 4 * bounds[1] - spacing < config.grid[-1] <= 4 * bounds[1]


def test_the_grid_of_horizons_goes_through_the_base_not_through_the_bounds() -> None:
    config = AutoLoCoConfig(base_horizon=55, min_horizon=21, max_horizon=83, horizon_step=10)
    assert config.horizons == (25, 35, 45, 55, 65, 75)
    assert config.grid[:3] == (5, 15, 25) and config.grid[-1] == 325  # at most 4 * 83


def test_settings_are_equal_when_the_behaviour_is() -> None:
    explicit = AutoLoCoConfig(base_horizon=100, min_horizon=50, max_horizon=150, horizon_step=10)
    assert AutoLoCoConfig(base_horizon=100).settings() == explicit.settings()
    assert AutoLoCoConfig(base_horizon=100, growth_cap=1.2).settings() != explicit.settings()


@pytest.mark.parametrize(
    "field,value",
    [
        ("base_horizon", 0),
        ("base_horizon", 10.0),
        ("base_horizon", True),
        ("min_horizon", 0),
        ("min_horizon", 101),
        ("max_horizon", 99),
        ("horizon_step", 0),
        ("warmup_steps", -1),
        ("growth_cap", 1.0),
        ("growth_cap", float("nan")),
        ("growth_cap", "1.15"),
        ("retire_ratio", 0.0),
        ("retire_ratio", 1.01),
        ("moderate_cut", 1.0),
        ("severe_cut", 1.1),
        ("history", 2),
        ("supporting_threshold", 0.0),
        ("consistent_threshold", 0.9),
        ("moderate_threshold", 2.0),
        ("moderate_threshold", float("inf")),
        ("scale_floor", 0.0),
        ("reference_weight", 0.0),
        ("reference_weight", 1.5),
        ("token_decay", 1.0),
    ],
)
def test_a_bad_setting_is_named_with_its_value(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{field} must be .*{value!r}"):
        AutoLoCoConfig(**{"base_horizon": 100, field: value})


@pytest.mark.parametrize(
    "field,value",
    [
        ("kind", "adam"),
        ("lr", 0.0),
        ("momentum", 1.0),
        ("momentum_min", -0.1),
        ("momentum_max", 0.4),
        ("momentum_max", 1.0),
        ("max_scale", 0.9),
        ("normalize", 1),
        ("adapt_lr", "yes"),
    ],
)
def test_a_bad_outer_setting_is_named_with_its_value(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{field} must be .*{value!r}"):
        OuterConfig(**{field: value})


@pytest.mark.parametrize(
    "policy,kind,lr,momentum",
    [
        ("autoloco", "nesterov", 0.7, 0.7),
        ("staircase", "nesterov", 0.7, 0.7),
        ("fixed", "nesterov", 0.7, 0.9),
        ("qsr", "average", 1.0, 0.0),
        ("linear", "average", 1.0, 0.0),
    ],
)
def test_what_is_left_out_is_the_policys_own(policy: str, kind: str, lr: float, momentum: float) -> None:
    outer = OuterConfig().resolved(policy)
    assert (outer.kind, outer.lr, outer.momentum) == (kind, lr, momentum)
    assert outer.resolved(policy) == outer


def test_what_is_given_is_kept() -> None:
    outer = OuterConfig(kind="nesterov", momentum=0.0, lr=0.5, max_scale=None).resolved("qsr")
    assert (outer.kind, outer.lr, outer.momentum, outer.max_scale) == ("nesterov", 0.5, 0.0, None)


def test_averaging_has_no_momentum() -> None:
    for make in (
        lambda: OuterConfig(kind="average", momentum=0.9),
        lambda: OuterConfig(momentum=0.9).resolved("linear"),
    ):
        with pytest.raises(ValueError, match="momentum must be left out with kind 'average'"):
            make()
