"""The reference profile and the assessment, by hand."""

from __future__ import annotations

from math import log

import pytest

from composer_replication.autoloco import AutoLoCoConfig
from composer_replication.autoloco.profile import (
    CONSISTENT,
    MODERATE,
    SEVERE,
    SUPPORTING,
    Profile,
    Statistics,
    classify,
    coherence,
    measure,
)
from tests.autoloco.observations import observation

CONFIG = AutoLoCoConfig(base_horizon=30)
# Logarithms are rounded to 2 ** -24.
QUANTUM = 2.0**-24


def taught(drifts: list[float], coherences: list[float] | None = None, needed: int = 1) -> Profile:
    profile = Profile(needed=needed)
    for drift, shared in zip(drifts, coherences or [0.0] * len(drifts), strict=True):
        profile = profile.learn(CONFIG, Statistics(drift=drift, coherence=shared))
    return profile


def test_statistics_are_logarithms_and_drift_is_freed_from_the_mass() -> None:
    got = measure(observation(drift=900.0, mean_square_norm=450.0, mass=15.0))
    assert got is not None
    assert got.drift == pytest.approx(log(4.0), abs=3 * QUANTUM)  # 900 / 15^2
    assert got.coherence == pytest.approx(log(2.0), abs=QUANTUM)  # 4 * 450 / 900


@pytest.mark.parametrize("square,roster,fleet,expected", [(900.0, 4, 4, 4.0), (225.0, 4, 4, 1.0), (450.0, 4, 4, 2.0)])
def test_coherence_is_one_for_unrelated_updates_and_the_roster_for_equal_ones(
    square: float, roster: int, fleet: int, expected: float
) -> None:
    assert coherence(observation(mean_square_norm=square, roster=roster, fleet=fleet)) == expected


@pytest.mark.parametrize("roster", [2, 3, 5, 8])
@pytest.mark.parametrize("correlation", [0.0, 0.25, 1.0])
def test_coherence_does_not_depend_on_the_roster(roster: int, correlation: float) -> None:
    # Equal norms and one correlation between any two: the mean's square norm is D * (1 + (N - 1) c) / N.
    square = 900.0 * (1 + (roster - 1) * correlation) / roster
    got = coherence(observation(mean_square_norm=square, roster=roster, fleet=8))
    assert got == pytest.approx(1 + 7 * correlation, rel=1e-12)  # rounding


@pytest.mark.parametrize("field", ["drift", "mean_square_norm", "mass"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_what_has_no_finite_logarithm_is_not_measured(field: str, value: float) -> None:
    assert measure(observation(**{field: value})) is None


def test_equal_logarithms_on_machines_that_differ_in_the_last_bit() -> None:
    one, other = (measure(observation(drift=drift)) for drift in (900.0, 900.0 * (1 + 2**-52)))
    assert one == other


def test_the_reference_is_the_geometric_mean_and_residuals_come_after_it() -> None:
    profile = taught([0.2, 0.4], [1.0, 2.0], needed=2)
    assert profile.reference == Statistics(drift=pytest.approx(0.3), coherence=1.5)  # type: ignore[arg-type]
    assert profile.drift_residuals == () and not profile.ready


def test_a_residual_is_taken_before_the_reference_moves_by_a_tenth() -> None:
    profile = taught([0.0, 1.0, 0.0], [0.0, -1.0, 0.0])
    assert profile.drift_residuals == (1.0, -0.1)
    assert profile.coherence_residuals == (-1.0, 0.1)
    assert profile.reference is not None
    assert profile.reference.drift == pytest.approx(0.09, rel=1e-12)
    assert profile.reference.coherence == pytest.approx(-0.09, rel=1e-12)


def test_ready_with_three_residuals_and_sixteen_are_kept() -> None:
    assert not taught([0.0] * 3).ready
    assert taught([0.0] * 4).ready
    profile = taught([0.0, *(float(k) for k in range(20))])
    assert len(profile.drift_residuals) == len(profile.coherence_residuals) == 16
    assert profile.drift_residuals == taught([0.0, *(float(k) for k in range(20))]).drift_residuals[-16:]


def profile_with(drifts: tuple[float, ...], coherences: tuple[float, ...] = (0.0, 0.0, 0.0)) -> Profile:
    return Profile(
        needed=1,
        reference=Statistics(drift=0.0, coherence=0.0),
        drift_residuals=drifts,
        coherence_residuals=coherences,
    )


def test_the_score_counts_scales_from_the_centre() -> None:
    # centre 0.4; distances 0.4 0.2 0 0.6 0.2, their median 0.2; scale 1.4826 * 0.2
    profile = profile_with((0.0, 0.2, 0.4, 1.0, 0.6))
    assert profile.score(CONFIG, Statistics(drift=1.0, coherence=0.0)) == pytest.approx(0.6 / 0.29652, rel=1e-9)
    # of an even number the two in the middle: centre 0.3; distances 0.3 0.1 0.1 0.7, median 0.2
    profile = profile_with((0.0, 0.2, 0.4, 1.0))
    assert profile.score(CONFIG, Statistics(drift=1.0, coherence=0.0)) == pytest.approx(0.7 / 0.29652, rel=1e-9)


def test_only_the_bad_side_counts_and_the_worse_of_the_two() -> None:
    profile = profile_with((0.0, 0.0, 0.0))  # scale 0.15, the floor

    def score(drift: float, shared: float) -> float:
        return profile.score(CONFIG, Statistics(drift=drift, coherence=shared))

    assert score(0.3, 0.0) == pytest.approx(2.0)  # more drift is bad
    assert score(0.0, -0.3) == pytest.approx(2.0)  # so is less coherence
    assert score(-0.3, 0.3) == pytest.approx(-2.0)  # the reverse is good
    assert score(0.3, -0.6) == pytest.approx(4.0) and score(0.6, -0.3) == pytest.approx(4.0)


@pytest.mark.parametrize(
    "score,expected",
    [
        (-9.0, SUPPORTING),
        (1.0, SUPPORTING),
        (1.0001, CONSISTENT),
        (2.5, CONSISTENT),
        (2.5001, MODERATE),
        (5.0, MODERATE),
        (5.0001, SEVERE),
    ],
)
def test_classes(score: float, expected: str) -> None:
    assert classify(CONFIG, score) == expected
