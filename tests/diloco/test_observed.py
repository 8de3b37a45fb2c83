"""What a policy sees of a round is a pure function of the reports."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from composer_replication.autoloco.values import Observation, Preview
from composer_replication.collective.base import Report
from composer_replication.diloco.observed import drift_of, observe, steps_of, successor, tokens_of

GRID = (4, 8)


def report(replica: int, **changed: Any) -> Report:
    usual = Report(
        replica=replica,
        steps=8,
        tokens=100,
        mass=0.5 + replica,
        square_norm=2.0 * replica + 1.0,
        finite=True,
        leaving=False,
        next_lr=0.1,
        preview=(0.4 + replica, 0.8 + replica),
        remaining=40,
        base="b",
        layout="l",
    )
    return replace(usual, **changed)


def seen(reports: list[Report], members: list[Report], **changed: Any) -> Observation | None:
    usual: dict[str, Any] = {"drift": None, "mean_square_norm": 0.25, "fleet": 3, "planned": 8, "cut": False}
    return observe(reports, members, **{**usual, "position": 16, "grid": GRID, **changed})


def test_a_round_of_all() -> None:
    members = [report(0), report(1), report(2)]
    assert seen(members, members) == Observation(
        drift=3.0,
        mean_square_norm=0.25,
        roster=3,
        fleet=3,
        steps=24,
        tokens=300,
        mass=1.5,
        position=16,
        truncated=False,
        preview=Preview(steps=GRID, sums=(0.4, 0.8), next_lr=0.1, remaining=40),
    )


def test_the_lowest_that_goes_on_is_planned_by_whether_averaged_or_not() -> None:
    leaving, member, other = report(0, leaving=True), report(2), report(1, finite=False, remaining=30, next_lr=0.2)
    found = seen([leaving, member, other], [leaving, member])
    assert found is not None and found.roster == 2 and found.steps == 16
    assert found.preview == Preview(steps=GRID, sums=other.preview, next_lr=0.2, remaining=30)
    assert successor([leaving, member, other]) is other


def test_nobody_goes_on() -> None:
    last = [report(0, leaving=True), report(1, leaving=True)]
    assert seen(last, last) is None and successor(last) is None


def test_nobody_was_averaged() -> None:
    found = seen([report(0, finite=False)], [], mean_square_norm=7.0)
    assert found is not None and found.roster == found.steps == found.tokens == 0
    assert all(math.isnan(value) for value in (found.drift, found.mean_square_norm, found.mass))


def test_what_the_round_agreed_on_is_its_drift() -> None:
    members = [report(0), report(1)]
    found = seen(members, members, drift=0.75)
    assert found is not None and found.drift == 0.75 == drift_of(members, 0.75)
    assert drift_of(members, None) == 2.0


@pytest.mark.parametrize(("steps", "cut", "truncated"), [(8, False, False), (7, False, True), (8, True, True)])
def test_cut_short_by_one_or_by_the_budget(steps: int, cut: bool, truncated: bool) -> None:
    members = [report(0), report(1, steps=steps)]
    found = seen(members, members, cut=cut)
    assert found is not None and found.truncated is truncated


def test_counts() -> None:
    assert tokens_of([report(0), report(1, tokens=None)]) is None
    assert tokens_of([report(0, tokens=0)]) == 0 == tokens_of([])
    assert steps_of([report(0, steps=3), report(1, steps=5)], 8) == 5
    assert steps_of([], 8) == 8 and steps_of([]) == 0
