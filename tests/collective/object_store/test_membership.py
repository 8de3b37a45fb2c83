"""Who is averaged when replicas are missing, late, leaving, in another state, or stopped; and what each one is told."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from composer_replication.collective.base import RoundOutcome
from composer_replication.collective.layout import Layout, Slot
from composer_replication.collective.object_store import ObjectStoreCollective
from composer_replication.errors import (
    Diverged,
    FleetMismatch,
    Interrupted,
    RoundAborted,
    RoundError,
    RoundTimeout,
    StoreUnavailable,
)
from composer_replication.store import MemoryStore
from composer_replication.store.retry import Retry
from tests.collective.conformance import SCALAR, begin, contribution, digest, snapshot
from tests.collective.object_store.helpers import Fleet, attempt, join, scalar
from tests.support.threads import run_threads


def wait_until(condition: Any, seconds: float = 20.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it never came to that"
        time.sleep(0.005)


def own(replica: int, round: int, value: float, **changes: Any) -> Any:
    return contribution(replica, round, SCALAR, torch.tensor([value]), **changes)


def test_strict_raises_alike_on_all_and_names_the_missing() -> None:
    with Fleet(3, timeout_seconds=0.3, start_timeout_seconds=0.3) as fleet:
        errors = fleet.round(0, {0: 1.0, 1: 2.0})
        late = attempt(lambda: fleet.all[2].average(own(2, 0, 3.0)))
        texts = {str(error) for error in (*errors.values(), late)}
        assert all(isinstance(error, RoundAborted) for error in (*errors.values(), late))
        assert len(texts) == 1 and "missing: replica 2" in texts.pop()


def test_the_start_takes_as_long_as_was_said_even_if_rounds_may_take_longer() -> None:
    with Fleet(2, timeout_seconds=600.0, start_timeout_seconds=3.0) as fleet:
        assert isinstance(fleet.round(0, {0: 1.0})[0], RoundAborted)


def test_after_an_abort_the_same_round_is_tried_again_by_new_processes() -> None:
    store = MemoryStore()
    with Fleet(2, store, timeout_seconds=0.2, start_timeout_seconds=0.2) as fleet:
        assert isinstance(fleet.round(0, {0: 1.0})[0], RoundAborted)
    again = [join(store, replica, 2) for replica in range(2)]

    def whole(collective: ObjectStoreCollective) -> float:
        collective.start(snapshot(SCALAR, 0), settings={"outer_lr": 1.0}, resumed=True)
        value = scalar(collective.average(own(collective.replica, 0, 2.0 + 4.0 * collective.replica)))
        collective.close()
        return value

    assert run_threads([lambda c=c: whole(c) for c in again]) == [4.0, 4.0]


def test_skip_averages_those_who_are_there() -> None:
    with Fleet(3, failure_policy="skip", timeout_seconds=0.3) as fleet:
        first = fleet.round(0, {0: 3.0, 1: 5.0, 2: 7.0})
        assert {scalar(outcome) for outcome in first.values()} == {5.0}
        second = fleet.round(1, {0: 3.0, 1: 5.0})
        for outcome in second.values():
            assert [report.replica for report in outcome.members] == [0, 1]
            assert outcome.absent == {2: "not ready in time"} and scalar(outcome) == 4.0
            assert outcome.expected_next == (0, 1, 2)  # one miss is tolerated
        third = fleet.round(2, {0: 3.0, 1: 5.0})
        assert {outcome.expected_next for outcome in third.values()} == {(0, 1)}  # two in a row are not
        began = time.monotonic()
        fourth = fleet.round(3, {0: 1.0, 1: 2.0})
        assert {scalar(outcome) for outcome in fourth.values()} == {1.5}
        assert time.monotonic() - began < 0.3, "nobody waits for it any more"


def test_round_0_needs_everyone_under_any_policy() -> None:
    with Fleet(3, failure_policy="skip", timeout_seconds=0.2, start_timeout_seconds=0.2) as fleet:
        errors = fleet.round(0, {0: 3.0, 1: 5.0})
        assert all(isinstance(error, RoundAborted) and "replica 2" in str(error) for error in errors.values())


def test_skip_needs_enough_of_them() -> None:
    with Fleet(3, failure_policy="skip", timeout_seconds=0.2) as fleet:
        fleet.round(0, {0: 3.0, 1: 5.0, 2: 7.0})
        error = fleet.round(1, {0: 3.0})[0]
        assert isinstance(error, RoundAborted) and "too few" in str(error) and "replica 1, 2" in str(error)


def test_an_overtaken_replica_learns_of_it_and_is_expected_again() -> None:
    with Fleet(3, failure_policy="skip", timeout_seconds=0.2, tolerated_misses=0) as fleet:
        fleet.round(0, {0: 1.0, 1: 1.0, 2: 1.0})
        slow = fleet.all[2]
        assert not slow.overtaken
        outcome = fleet.round(1, {0: 3.0, 1: 5.0})[0]
        assert outcome.expected_next == (0, 1)
        wait_until(lambda: slow.overtaken)
        late = slow.average(own(2, 1, 100.0))
        assert [report.replica for report in late.members] == [0, 1] and scalar(late) == 4.0
        assert late.absent == {2: "not ready in time"} and not slow.overtaken
        # It has said that it is alive, so the round after the next one waits for it.
        assert fleet.round(2, {0: 3.0, 1: 5.0})[0].expected_next == (0, 1, 2)
        followed = slow.follow(2, SCALAR, digest(2), wait=False)
        assert followed is not None and scalar(followed) == 4.0
        assert {scalar(o) for o in fleet.round(3, {0: 3.0, 1: 5.0, 2: 7.0}).values()} == {5.0}


def test_following_an_open_round() -> None:
    with Fleet(2) as fleet:
        assert fleet.all[1].follow(0, SCALAR, digest(0), wait=False) is None
        fleet.round(0, {0: 3.0, 1: 5.0})
        assert fleet.all[1].follow(1, SCALAR, digest(1), wait=False) is None


def test_an_onlooker_gives_up_when_nobody_lives() -> None:
    with Fleet(2, timeout_seconds=0.2) as fleet:
        outcome = fleet.round(0, {0: 3.0, 1: 5.0}, leaving=True)[0]
        assert outcome.expected_next == ()
        with pytest.raises(RoundError, match="run is over"):
            fleet.all[0].follow(1, SCALAR, digest(1), wait=True)
    with Fleet(2, timeout_seconds=0.2) as fleet:
        run_threads(
            [
                lambda: fleet.all[0].average(own(0, 0, 1.0, leaving=True)),
                lambda: fleet.all[1].average(own(1, 0, 1.0)),
            ]
        )
        fleet.all[1].close()  # its heart stands still
        with pytest.raises(RoundTimeout, match="no heartbeat of replica 1"):
            fleet.all[0].follow(1, SCALAR, digest(1), wait=True)


def diverging(round: int, value: float, replica: int) -> Any:
    made = own(replica, round, value)
    return replace(made, report=replace(made.report, base="nonsense"))


def test_another_state_is_never_averaged_under_skip() -> None:
    with Fleet(3, failure_policy="skip", timeout_seconds=5.0) as fleet:
        fleet.round(0, {0: 1.0, 1: 1.0, 2: 1.0})
        outcomes = run_threads(
            [
                lambda: attempt(lambda: fleet.all[0].average(own(0, 1, 3.0))),
                lambda: attempt(lambda: fleet.all[1].average(own(1, 1, 5.0))),
                lambda: attempt(lambda: fleet.all[2].average(diverging(1, 100.0, 2))),
            ]
        )
        assert scalar(outcomes[0]) == scalar(outcomes[1]) == 4.0
        assert outcomes[0].absent == {2: "its interval started from another state"}
        assert isinstance(outcomes[2], Diverged) and "joins from the fleet's newest" in str(outcomes[2])


def test_another_state_ends_a_strict_round_for_all() -> None:
    with Fleet(3) as fleet:
        outcomes = run_threads(
            [
                lambda: attempt(lambda: fleet.all[0].average(own(0, 0, 3.0))),
                lambda: attempt(lambda: fleet.all[1].average(own(1, 0, 5.0))),
                lambda: attempt(lambda: fleet.all[2].average(diverging(0, 100.0, 2))),
            ]
        )
        assert isinstance(outcomes[0], RoundAborted) and isinstance(outcomes[1], RoundAborted)
        assert isinstance(outcomes[2], Diverged)
        assert "replica 2: its interval started from another state" in str(outcomes[0])


@pytest.mark.parametrize("policy", ["strict", "skip"])
def test_two_states_without_a_majority_go_nowhere(policy: Any) -> None:
    with Fleet(2, failure_policy=policy) as fleet:
        outcomes = run_threads(
            [
                lambda: attempt(lambda: fleet.all[0].average(own(0, 0, 3.0))),
                lambda: attempt(lambda: fleet.all[1].average(diverging(0, 100.0, 1))),
            ]
        )
        assert all(isinstance(outcome, RoundAborted) for outcome in outcomes)


def test_other_tensors_are_named() -> None:
    other = Layout((Slot("theta", (), "torch.float32"), Slot("head", (3,), "torch.float32")))
    with Fleet(3, failure_policy="skip") as fleet:
        outcomes = run_threads(
            [
                lambda: attempt(lambda: fleet.all[0].average(own(0, 0, 3.0))),
                lambda: attempt(lambda: fleet.all[1].average(own(1, 0, 5.0))),
                lambda: attempt(lambda: fleet.all[2].average(contribution(2, 0, other, torch.ones(4)))),
            ]
        )
        assert scalar(outcomes[0]) == 4.0 and outcomes[0].absent == {2: "it trained other tensors"}
        assert isinstance(outcomes[2], FleetMismatch) and "head: only here" in str(outcomes[2])


def test_a_mean_that_overflows_is_no_mean() -> None:
    most = torch.finfo(torch.float32).max
    with Fleet(2) as fleet:
        for outcome in fleet.round(0, {0: most, 1: most}).values():
            assert outcome.members == () and [report.replica for report in outcome.others] == [0, 1]
            assert outcome.absent == {0: "the mean is not finite", 1: "the mean is not finite"}
            assert outcome.expected_next == (0, 1)
            with pytest.raises(RoundError, match="no mean"):
                outcome.mean(0, torch.empty(1))
        assert {scalar(outcome) for outcome in fleet.round(1, {0: 3.0, 1: 5.0}).values()} == {4.0}


def test_stopping_while_waiting_and_coming_back() -> None:
    """Asked to stop while it waits: the contribution is in, and a new process adopts it; it counts once."""
    store, stop = MemoryStore(), threading.Event()
    zero, one = join(store, 0, 2), join(store, 1, 2, interrupted=stop.is_set, trace=lambda s: stopper(s))

    def stopper(step: str) -> None:
        if step == "after:ready":
            stop.set()

    run_threads([lambda: begin(zero, SCALAR), lambda: begin(one, SCALAR)])
    with pytest.raises(Interrupted, match="replica 1"):
        one.average(own(1, 0, 5.0))
    one.close()
    back = join(store, 1, 2)
    back.start(snapshot(SCALAR, 0), settings={"outer_lr": 1.0}, resumed=True)
    outcomes: list[RoundOutcome] = run_threads(
        [lambda: zero.average(own(0, 0, 3.0)), lambda: back.average(own(1, 0, 1000.0))]
    )
    assert [scalar(outcome) for outcome in outcomes] == [4.0, 4.0]
    zero.close()
    back.close()


def test_stopping_does_not_wait_for_a_store_that_fails() -> None:
    """A store that tries each operation again for longer than anybody waits for a process that is to stop."""
    stop = threading.Event()

    class Failing(MemoryStore):
        def put(self, key: str, data: Any) -> None:
            if "/in/" not in key:
                return super().put(key, data)
            stop.set()
            for _ in Retry(seconds=1000.0, first_pause_seconds=500.0, max_pause_seconds=500.0).pauses():
                pass  # it fails
            raise StoreUnavailable(f"{key}: throttled")

    one = join(Failing(), 0, 1, interrupted=stop.is_set)
    begin(one, SCALAR)
    began = time.monotonic()
    with pytest.raises(Interrupted, match="replica 0"):
        one.average(own(0, 0, 5.0))
    one.close()
    assert time.monotonic() - began < 60.0


def test_a_contribution_that_is_in_is_waited_for_when_following() -> None:
    store = MemoryStore()
    with Fleet(2, store) as fleet:
        ends: list[Any] = []
        waiting = threading.Thread(target=lambda: ends.append(attempt(lambda: fleet.all[1].average(own(1, 0, 5.0)))))
        waiting.start()
        wait_until(lambda: any("/ready/1.json" in key for key in store.list("rounds/")))
        # as a new process of the same replica would, before it trains anything
        fleet.all[1].close()
        back = join(store, 1, 2)
        back.start(snapshot(SCALAR, 0), settings={"outer_lr": 1.0}, resumed=True)
        outcomes = run_threads(
            [lambda: fleet.all[0].average(own(0, 0, 3.0)), lambda: back.follow(0, SCALAR, digest(0), wait=False)]
        )
        assert [scalar(outcome) for outcome in outcomes] == [4.0, 4.0]
        waiting.join(timeout=30)
        back.close()


def test_who_has_left_is_not_called_back_by_a_restart() -> None:
    with Fleet(3, failure_policy="skip", timeout_seconds=5.0) as fleet:
        outcomes = run_threads(
            [
                lambda: fleet.all[0].average(own(0, 0, 3.0)),
                lambda: fleet.all[1].average(own(1, 0, 5.0)),
                lambda: fleet.all[2].average(own(2, 0, 7.0, leaving=True)),
            ]
        )
        assert outcomes[0].expected_next == (0, 1)
        fleet.all[2].close()
        back = join(fleet.store, 2, 3, failure_policy="skip", timeout_seconds=5.0)
        back.start(snapshot(SCALAR, 1), settings={"outer_lr": 1.0}, resumed=True)
        with pytest.raises(RoundError, match="has left the run"):
            back.average(own(2, 1, 1.0))
        followers = run_threads(
            [
                lambda: fleet.all[0].average(own(0, 1, 3.0)),
                lambda: fleet.all[1].average(own(1, 1, 5.0)),
                lambda: back.follow(1, SCALAR, digest(1), wait=True),
            ]
        )
        assert {scalar(outcome) for outcome in followers} == {4.0}
        assert fleet.round(2, {0: 1.0, 1: 1.0})[0].expected_next == (0, 1)
        back.close()
