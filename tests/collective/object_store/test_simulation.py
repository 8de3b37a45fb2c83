"""The protocol under a simulated store and clock: safe and live with its rules, found out without any of them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.collective.object_store.simulation import MUTATIONS, make

# Where the search for a failing schedule begins, so that the quick tests needn't look at many.
FIRST_SEED = {"mean overwritten": 44, "base not checked": 48, "read ahead unverified": 17}


def outcomes(seeds: Iterable[int], mutation: str = "") -> dict[int, str]:
    """Seeds of the schedules that fail, with what went wrong."""
    failed: dict[int, str] = {}
    for seed in seeds:
        try:
            make(seed, mutation=mutation).run(steps=12_000 if mutation else 40_000)
        except AssertionError as error:
            failed[seed] = str(error)
            if mutation:
                break
    return failed


@pytest.mark.parametrize("batch", range(2))
def test_no_schedule_breaks_the_protocol(batch: int) -> None:
    assert outcomes(range(10 * batch, 10 * (batch + 1))) == {}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("batch", range(10))
def test_no_schedule_of_many_breaks_the_protocol(batch: int) -> None:
    assert outcomes(range(1000 + 200 * batch, 1100 + 200 * batch)) == {}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_without_a_rule_the_simulation_finds_a_failure(mutation: str) -> None:
    first = FIRST_SEED.get(mutation, 0)
    assert outcomes(range(first, first + 150), mutation), f"{mutation}: no schedule failed, so nothing here guards it"
    # and the same schedule with the rule in place is sound
    assert outcomes([first]) == {}


def test_schedules_are_reproducible() -> None:
    one, two = make(7), make(7)
    one.run()
    two.run()
    assert (one.applied, one.now) == (two.applied, two.now)
    assert len(one.applied) >= 2
