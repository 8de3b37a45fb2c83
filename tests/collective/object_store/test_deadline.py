"""How long a replica waits under skip: by what past rounds have taught; and no round is given up sooner for it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from composer_replication.collective.object_store.deadline import FACTOR, INTERVAL_PART, WINDOW, Patience
from composer_replication.errors import RoundAborted
from composer_replication.store import MemoryStore
from tests.collective.conformance import SCALAR, contribution, snapshot
from tests.collective.object_store.helpers import Fleet, attempt, scalar

ONE = torch.ones(1)
LONG = 20.0  # what none of these rounds may take
SKIP: dict[str, Any] = {
    "failure_policy": "skip",
    "timeout_seconds": LONG,
    "deadline_floor_seconds": 0.2,
    "tolerated_misses": 100,
}


def learn(fleet: Fleet, rounds: int = 2) -> None:
    """Rounds in which everyone is there; their ends are told."""
    for number in range(rounds):
        fleet.round(number, {collective.replica: 1.0 for collective in fleet.all})
        tell(fleet, number)


def tell(fleet: Fleet, number: int, replicas: tuple[int, ...] = (0, 1, 2)) -> None:
    for replica in replicas:
        fleet.all[replica].applied(lambda: snapshot(SCALAR, number + 1))


def test_patience_follows_what_it_has_seen() -> None:
    patience = Patience(floor_seconds=10.0, ceiling_seconds=600.0)
    assert patience.seconds(30.0) == 600.0, "nothing has been learned yet"
    patience.saw({1: 0.5, 2: 1.0})
    assert patience.seconds(30.0) == 10.0
    assert patience.seconds(None) == 600.0, "an interval of which nobody knows how long it was"
    assert patience.seconds(1000.0) == INTERVAL_PART * 1000.0
    patience.saw({1: 0.5, 2: 40.0})
    for _ in range(WINDOW - 1):
        assert patience.seconds(30.0) == FACTOR * 40.0
        patience.saw({1: 0.5})
    assert patience.seconds(30.0) == FACTOR * 40.0
    patience.saw({})
    assert patience.seconds(30.0) == 10.0, "it has been forgotten"
    patience.saw({2: 500.0})
    assert patience.seconds(30.0) == 600.0


def test_a_replica_that_is_always_slow_does_not_cost_the_time_out_in_each_round() -> None:
    with Fleet(3, **SKIP) as fleet:
        learn(fleet)
        began = time.monotonic()
        for number in range(2, 6):
            outcomes = fleet.round(number, {0: 3.0, 1: 5.0})
            assert {scalar(outcome) for outcome in outcomes.values()} == {4.0}
            assert all(outcome.expected_next == (0, 1, 2) for outcome in outcomes.values()), "it is waited for"
            tell(fleet, number, (0, 1))
        assert time.monotonic() - began < LONG / 2


def test_a_round_that_it_came_too_late_for_teaches_a_replica_nothing() -> None:
    with Fleet(3, **SKIP) as fleet:
        learn(fleet)
        patience = fleet.all[2]._patience
        assert patience is not None
        learned = list(patience._waits)
        fleet.round(2, {0: 3.0, 1: 5.0})
        late = fleet.round(2, {2: 7.0})[2]
        assert late.absent == {2: "not ready in time"} and late.lateness == {}
        assert list(patience._waits) == learned, "it hasn't seen that nobody is late"


def test_a_fixed_deadline_is_the_time_out() -> None:
    with Fleet(3, **{**SKIP, "deadline": "fixed", "timeout_seconds": 1.0}) as fleet:
        learn(fleet)
        began = time.monotonic()
        fleet.round(2, {0: 3.0, 1: 5.0})
        assert time.monotonic() - began >= 1.0


def test_a_round_is_not_given_up_before_the_time_out() -> None:
    """One of three isn't enough: it waits far beyond its patience, and the second one makes it a round."""
    with Fleet(3, **SKIP) as fleet:
        learn(fleet)
        results: list[Any] = []
        first = threading.Thread(
            target=lambda: results.append(attempt(lambda: fleet.all[0].average(contribution(0, 2, SCALAR, ONE))))
        )
        first.start()
        naps = 0
        while naps < 4:  # as many patiences
            naps += 1
            time.sleep(0.2)
            assert not results
        outcome = fleet.round(2, {1: 5.0})[1]
        first.join(timeout=LONG)
        assert scalar(results[0]) == scalar(outcome) == 3.0 and outcome.absent == {2: "not ready in time"}
        assert results[0].lateness[1] > 0.5 and set(results[0].lateness) == {1}


def test_too_few_at_the_time_out() -> None:
    with Fleet(3, **{**SKIP, "timeout_seconds": 0.6, "deadline_floor_seconds": 0.05}) as fleet:
        learn(fleet)
        began = time.monotonic()
        error = fleet.round(2, {0: 1.0})[0]
        assert isinstance(error, RoundAborted) and time.monotonic() - began >= 0.6


def test_strict_waits_the_whole_time() -> None:
    with Fleet(3, timeout_seconds=0.8, deadline_floor_seconds=0.01) as fleet:
        learn(fleet)
        began = time.monotonic()
        assert isinstance(fleet.round(2, {0: 1.0, 1: 1.0})[0], RoundAborted)
        assert time.monotonic() - began >= 0.8


def test_lateness_is_told_from_each_ones_own_side() -> None:
    with Fleet(2, MemoryStore()) as fleet:
        results: dict[int, Any] = {}

        def one(replica: int) -> None:
            results[replica] = fleet.all[replica].average(contribution(replica, 0, SCALAR, ONE))

        first = threading.Thread(target=one, args=(0,))
        first.start()
        while not any("/ready/0.json" in key for key in fleet.store.list("rounds/")):
            time.sleep(0.002)
        time.sleep(0.3)
        one(1)
        first.join(timeout=LONG)
        assert results[0].lateness[1] >= 0.3
        assert results[1].lateness.keys() == {0} and results[1].lateness[0] < results[0].lateness[1]


@pytest.mark.parametrize("deadline", ["soon", "", None])
def test_an_unknown_deadline(deadline: Any) -> None:
    with pytest.raises(ValueError, match="deadline must be 'adaptive' or 'fixed'"):
        Fleet(2, deadline=deadline)
