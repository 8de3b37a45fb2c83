"""How long a replica waits under skip: by what past rounds have taught; and no round is given up sooner for it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from composer_replication.collective.object_store.deadline import (
    FACTOR,
    INTERVAL_PART,
    RETURNING_FACTOR,
    WINDOW,
    Patience,
)
from composer_replication.collective.object_store.events import Job, Timing
from composer_replication.collective.object_store.pointers import Ready
from composer_replication.collective.object_store.roster import Declared, Plan, Policy
from composer_replication.collective.object_store.round import begin, deadline_of, enough_for
from composer_replication.errors import RoundAborted
from tests.collective.conformance import SCALAR, contribution, digest, snapshot
from tests.collective.object_store.helpers import Clock, Fleet, attempt, scalar
from tests.support.threads import run_threads

ONE = torch.ones(1)
LONG = 20.0  # what none of these rounds may take
SKIP: dict[str, Any] = {
    "failure_policy": "skip",
    "timeout_seconds": LONG,
    "deadline_floor_seconds": 0.2,
    "tolerated_misses": 100,
}


def learn(fleet: Fleet, rounds: int = 3) -> None:
    """Rounds in which everyone is there; their ends are told. The waits of round 1, the first that count, are reported
    in round 2."""
    for number in range(rounds):
        fleet.round(number, {collective.replica: 1.0 for collective in fleet.all})
        tell(fleet, number)


def tell(fleet: Fleet, number: int, replicas: tuple[int, ...] = (0, 1, 2)) -> None:
    for replica in replicas:
        fleet.all[replica].applied(lambda: snapshot(SCALAR, number + 1))


def test_patience_follows_what_it_has_seen() -> None:
    patience = Patience(floor_seconds=10.0, ceiling_seconds=600.0)
    assert patience.seconds(30.0) == 600.0, "nothing has been learned yet"
    patience.saw([None, None])
    assert patience.seconds(30.0) == 600.0, "nobody could tell"
    patience.saw([0.5, None, 1.0])
    assert patience.seconds(30.0) == 10.0
    assert patience.seconds(30.0, returning=True) == RETURNING_FACTOR * 10.0
    assert patience.seconds(None) == 600.0, "an interval of which nobody knows how long it was"
    assert patience.seconds(1000.0) == INTERVAL_PART * 1000.0
    # Who is expected again and trains for 1.3 intervals from when it heard of the last round is 0.3 of one late.
    assert patience.seconds(1000.0, returning=True) > 0.3 * 1000.0
    patience.saw([0.0, 40.0])
    for _ in range(WINDOW - 1):
        assert patience.seconds(30.0) == FACTOR * 40.0
        patience.saw([0.5])
    assert patience.seconds(30.0) == FACTOR * 40.0
    patience.saw([0.0])
    assert patience.seconds(30.0) == 10.0, "it has been forgotten"
    patience.saw([200.0])
    assert patience.seconds(30.0, returning=True) == 600.0
    patience.saw([500.0])
    assert patience.seconds(30.0) == 600.0


def played(fleet: Fleet, number: int, late: dict[int, float], replicas: tuple[int, ...]) -> dict[int, Any]:
    """A round in which these contribute so many seconds after the others."""

    def one(replica: int) -> Any:
        time.sleep(late.get(replica, 0.0))  # training
        collective = fleet.all[replica]
        outcome = attempt(lambda: collective.average(contribution(replica, number, SCALAR, ONE)))
        collective.applied(lambda: snapshot(SCALAR, number + 1))
        return outcome

    return dict(zip(replicas, run_threads([lambda r=r: one(r) for r in replicas]), strict=True))


def test_whoever_was_last_itself_does_not_shut_out_the_others() -> None:
    """Replica 3 has waited for nobody; then it is fast, and replica 2 as slow as ever."""
    everyone = (0, 1, 2, 3)
    with Fleet(4, **{**SKIP, "deadline_floor_seconds": 0.02}) as fleet:
        for number in range(3):
            played(fleet, number, {2: 0.2, 3: 0.4}, everyone)
        for number in range(3, 6):
            outcomes = played(fleet, number, {2: 0.2}, everyone)
            assert all(outcome.absent == {} for outcome in outcomes.values()), outcomes
        learned = [collective._patience for collective in fleet.all]
        assert all(patience is not None and patience._waits for patience in learned)
        assert len({tuple(patience._waits) for patience in learned if patience is not None}) == 1


def test_who_was_away_gets_in_again_though_it_is_slower() -> None:
    """Its interval takes 1.3 times as long as the others'; it has been gone so long that they have forgotten how late
    it used to be."""
    interval = 0.6
    others = {0: interval, 1: interval}
    with Fleet(3, **{**SKIP, "deadline_floor_seconds": 0.02, "tolerated_misses": 2}) as fleet:
        learn(fleet)
        for number in range(3, 6):
            last = played(fleet, number, {}, (0, 1))
        assert last[0].expected_next == (0, 1), "nobody waits for it any more"
        for number in range(3, 6):
            assert fleet.all[2].follow(number, SCALAR, digest(number), wait=False) is not None
            fleet.all[2].applied(lambda number=number: snapshot(SCALAR, number + 1))
        seen = [played(fleet, number, {**others, 2: 1.3 * interval}, (0, 1, 2)) for number in range(6, 9)]
        assert all(outcomes[0].absent == {} for outcomes in seen[-2:]), "it is in again, and stays"


def test_a_replica_that_is_always_slow_does_not_cost_the_time_out_in_each_round() -> None:
    with Fleet(3, **SKIP) as fleet:
        learn(fleet)
        began = time.monotonic()
        for number in range(3, 7):
            outcomes = fleet.round(number, {0: 3.0, 1: 5.0})
            assert {scalar(outcome) for outcome in outcomes.values()} == {4.0}
            assert all(outcome.expected_next == (0, 1, 2) for outcome in outcomes.values()), "it is waited for"
            tell(fleet, number, (0, 1))
        assert time.monotonic() - began < LONG / 2


def test_a_replica_learns_from_a_round_that_it_came_too_late_for_what_the_others_learn() -> None:
    with Fleet(3, **SKIP) as fleet:
        learn(fleet)
        fleet.round(3, {0: 3.0, 1: 5.0})
        late = fleet.round(3, {2: 7.0})[2]
        assert late.absent == {2: "not ready in time"} and late.lateness == {}
        learned = [collective._patience for collective in fleet.all]
        assert len({tuple(patience._waits) for patience in learned if patience is not None}) == 1
        assert fleet.all[2]._longest is None, "it hasn't seen that nobody is late"


def test_a_fixed_deadline_is_the_time_out() -> None:
    with Fleet(3, **{**SKIP, "deadline": "fixed", "timeout_seconds": 1.0}) as fleet:
        learn(fleet)
        began = time.monotonic()
        fleet.round(3, {0: 3.0, 1: 5.0})
        assert time.monotonic() - began >= 1.0


def test_a_round_is_not_given_up_before_the_time_out() -> None:
    """One of three isn't enough: it waits far beyond its patience, and the second one makes it a round."""
    clock = Clock()
    with Fleet(3, **SKIP, **clock.settings) as fleet:
        learn(fleet)
        results: list[Any] = []
        first = threading.Thread(
            target=lambda: results.append(attempt(lambda: fleet.all[0].average(contribution(0, 3, SCALAR, ONE))))
        )
        first.start()
        for _ in range(4):  # as many patiences
            clock.move(0.2)
            assert not results
        outcome = fleet.round(3, {1: 5.0})[1]
        first.join(timeout=LONG)
        assert scalar(results[0]) == scalar(outcome) == 3.0 and outcome.absent == {2: "not ready in time"}
        assert results[0].lateness[1] > 0.5 and set(results[0].lateness) == {1}


def test_too_few_at_the_time_out() -> None:
    with Fleet(3, **{**SKIP, "timeout_seconds": 0.6, "deadline_floor_seconds": 0.05}) as fleet:
        learn(fleet)
        began = time.monotonic()
        error = fleet.round(3, {0: 1.0})[0]
        assert isinstance(error, RoundAborted) and time.monotonic() - began >= 0.6


def test_strict_waits_the_whole_time() -> None:
    with Fleet(3, timeout_seconds=0.8, deadline_floor_seconds=0.01) as fleet:
        learn(fleet)
        began = time.monotonic()
        assert isinstance(fleet.round(3, {0: 1.0, 1: 1.0})[0], RoundAborted)
        assert time.monotonic() - began >= 0.8


def test_lateness_is_told_from_each_ones_own_side() -> None:
    clock = Clock()
    with Fleet(2, **clock.settings) as fleet:
        results: dict[int, Any] = {}

        def one(replica: int) -> None:
            results[replica] = fleet.all[replica].average(contribution(replica, 0, SCALAR, ONE))

        first = threading.Thread(target=one, args=(0,))
        first.start()
        while not any("/ready/0.json" in key for key in fleet.store.list("rounds/")):
            time.sleep(0.002)
        clock.move(3.0)
        one(1)
        first.join(timeout=LONG)
        assert results[0].lateness[1] >= 3.0
        assert results[1].lateness.keys() == {0} and results[1].lateness[0] < results[0].lateness[1]


def test_newcomers_are_counted_but_in_the_first_round() -> None:
    """By the deadline, and by the line that says what will happen, as by the roster."""
    job = Job(
        plan=Plan(run="r", round=3, prev="", base="", expected=(0, 1)),
        policy=Policy(strict=False, fleet=(0, 1, 2), min_replicas=2),
        timing=Timing(
            timeout_seconds=LONG, takeover_seconds=1.0, poll_seconds=0.1, max_poll_seconds=1.0, patience_seconds=1.0
        ),
        replica=0,
        incarnation=1,
        layout="",
        report=None,
    )
    ready = Declared(Ready(run="r", round=3, attempt=0, replica=0, incarnation=1), "")
    state = replace(begin(job), waiting_since=0.0, declared={0: ready})
    assert not enough_for(state) and deadline_of(state) == LONG
    for other in (1, 2):
        state = replace(state, declared={0: ready, other: ready})
        assert enough_for(state) and deadline_of(state) == 1.0
    first = replace(job, policy=replace(job.policy, first_round=3))
    state = replace(begin(first), waiting_since=0.0, declared={0: ready, 2: ready})
    assert not enough_for(state) and deadline_of(state) == LONG


@pytest.mark.parametrize("deadline", ["soon", "", None])
def test_an_unknown_deadline(deadline: Any) -> None:
    with pytest.raises(ValueError, match="deadline must be 'adaptive' or 'fixed'"):
        Fleet(2, deadline=deadline)
