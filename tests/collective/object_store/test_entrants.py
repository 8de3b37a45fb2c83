"""Replicas that come in after the start, leave, and come back: under skip, and never under strict."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from composer_replication.collective.object_store import ObjectStoreCollective, keys
from composer_replication.collective.object_store.entrants import Entrants
from composer_replication.errors import FleetMismatch, RoundAborted
from composer_replication.store import MemoryStore
from tests.collective.conformance import SCALAR, Seen, contribution, digest, seen, snapshot
from tests.collective.object_store.helpers import Fleet, attempt, join
from tests.collective.object_store.toy import Toy, run_toy
from tests.support.threads import run_threads

SKIP: dict[str, Any] = {"failure_policy": "skip", "timeout_seconds": 5.0, "deadline_floor_seconds": 0.2}


def own(replica: int, round: int, value: float, **changes: Any) -> Any:
    return contribution(replica, round, SCALAR, torch.tensor([value]), **changes)


def entrant(store: MemoryStore, replica: int, replicas: int, **settings: Any) -> tuple[ObjectStoreCollective, int]:
    """Starts a replica without a checkpoint, and follows to the open round; gives that round."""
    collective = join(store, replica, replicas, **{**SKIP, **settings})
    got = collective.start(snapshot(SCALAR, 0), settings={"outer_lr": 1.0}, resumed=False)
    return collective, follow(collective, got.round)


def follow(collective: ObjectStoreCollective, round: int) -> int:
    while collective.follow(round, SCALAR, digest(round), wait=False) is not None:
        round += 1
        collective.applied(lambda now=round: snapshot(SCALAR, now))
    return round


def play(collectives: list[ObjectStoreCollective], round: int, values: dict[int, float], **changes: Any) -> list[Seen]:
    """One round of those who have values, and what each of them saw."""

    def one(collective: ObjectStoreCollective) -> Seen:
        outcome = collective.average(own(collective.replica, round, values[collective.replica], **changes))
        found = seen(outcome, SCALAR)
        collective.applied(lambda: snapshot(SCALAR, round + 1))
        return found

    some = [collective for collective in collectives if collective.replica in values]
    return run_threads([lambda c=c: one(c) for c in some])


def test_joining_contributing_leaving_and_coming_back() -> None:
    with Fleet(2, **SKIP, checkpoint_every=2) as fleet:
        for number in range(3):
            play(fleet.all, number, {0: 1.0, 1: 1.0})
        new, round = entrant(fleet.store, 5, 2, checkpoint_every=2)
        assert round == 3, "from checkpoint 2, and the round since"
        assert fleet.store.list("joins/") == ["joins/0.json"]
        # It is there before the two, who don't expect it: averaged all the same, and expected from now on.
        waiting = threading.Thread(target=play, args=([new], 3, {5: 7.0}))
        waiting.start()
        while keys.ready(3, 0, 5) not in fleet.store.list("rounds/00000003/"):
            time.sleep(0.002)
        outcomes = play(fleet.all, 3, {0: 3.0, 1: 5.0})
        waiting.join(timeout=30)
        for outcome in outcomes:
            assert outcome.members == (0, 1, 5) and outcome.mean[0] == 5.0
            assert outcome.expected_next == (0, 1, 5)
        everyone = [*fleet.all, new]
        assert {o.mean[0] for o in play(everyone, 4, {0: 3.0, 1: 5.0, 5: 10.0})} == {6.0}
        # It leaves, and nobody waits for it.
        outcomes = run_threads(
            [
                lambda: play([fleet.all[0]], 5, {0: 3.0})[0],
                lambda: play([fleet.all[1]], 5, {1: 5.0})[0],
                lambda: play([new], 5, {5: 10.0}, leaving=True)[0],
            ]
        )
        assert {o.mean[0] for o in outcomes} == {6.0} and outcomes[0].expected_next == (0, 1)
        new.close()
        play(fleet.all, 6, {0: 1.0, 1: 1.0})
        # Another process takes the id, and takes part again.
        back, round = entrant(fleet.store, 5, 2, checkpoint_every=2)
        assert round == 7 and fleet.store.list("joins/") == ["joins/0.json"], "one announcement for all its lives"
        assert [key for key in fleet.store.list("claims/5/") if not key.endswith("closed")] == [
            "claims/5/1",
            "claims/5/2",
        ]
        waiting = threading.Thread(target=play, args=([back], 7, {5: 9.0}))
        waiting.start()
        while keys.ready(7, 0, 5) not in fleet.store.list("rounds/00000007/"):
            time.sleep(0.002)
        outcomes = play(fleet.all, 7, {0: 3.0, 1: 6.0})
        waiting.join(timeout=30)
        assert {o.mean[0] for o in outcomes} == {6.0} and outcomes[0].expected_next == (0, 1, 5)
        back.close()


def test_a_newcomer_that_comes_too_late_for_its_first_round_is_expected_soon() -> None:
    with Fleet(2, **SKIP) as fleet:
        play(fleet.all, 0, {0: 1.0, 1: 1.0})
        new, round = entrant(fleet.store, 2, 2)
        assert round == 1
        play(fleet.all, 1, {0: 1.0, 1: 1.0})  # while it trains its first interval
        late = play([new], 1, {2: 100.0})[0]
        assert late.members == (0, 1), "nobody waited for it"
        assert late.expected_next == (0, 1, 2), "when it had caught up, it said that it is alive"
        assert {o.mean[0] for o in play([*fleet.all, new], 2, {0: 3.0, 1: 6.0, 2: 9.0})} == {6.0}
        new.close()


def test_joins_leaves_and_misses_in_one_round() -> None:
    with Fleet(3, **SKIP, tolerated_misses=0) as fleet:
        play(fleet.all, 0, {0: 1.0, 1: 1.0, 2: 1.0})
        play(fleet.all, 1, {0: 1.0, 1: 1.0, 2: 1.0})
        new, _ = entrant(fleet.store, 7, 3, tolerated_misses=0)
        outcomes = run_threads(
            [
                lambda: play([fleet.all[0]], 2, {0: 3.0})[0],
                lambda: play([fleet.all[1]], 2, {1: 5.0}, leaving=True)[0],
                lambda: play([new], 2, {7: 10.0})[0],
            ]
        )
        for outcome in outcomes:
            assert outcome.members == (0, 1, 7) and outcome.mean[0] == 6.0
            assert outcome.absent == {2: "not ready in time"} and outcome.expected_next == (0, 7)
        assert {o.mean[0] for o in play([fleet.all[0], new], 3, {0: 2.0, 7: 4.0})} == {3.0}
        # The run goes on with whoever stays, and ends with them.
        end = play([fleet.all[0], new], 4, {0: 2.0, 7: 4.0}, leaving=True)
        assert end[0].expected_next == ()
        for collective in (fleet.all[0], new):
            collective.finish("end", {})
        assert fleet.store.list("final.json") == ["final.json"]
        new.close()


@pytest.mark.parametrize(("replicas", "least"), [(2, None), (4, 3)])
def test_newcomers_count_among_those_that_a_round_needs(replicas: int, least: int | None) -> None:
    """Half of the fleet dies, and another replica comes in its place just then."""
    settings = {**SKIP, "timeout_seconds": 0.5, "start_timeout_seconds": 30.0, "min_replicas": least}
    with Fleet(replicas, **settings) as fleet:
        for number in range(2):
            play(fleet.all, number, dict.fromkeys(range(replicas), 1.0))
        new, _ = entrant(fleet.store, 7, replicas, **settings)
        here = {replica: 3.0 for replica in (*range(replicas // 2), 7)}
        for outcome in play([*fleet.all, new], 2, here):
            assert outcome.members == tuple(here) and outcome.mean[0] == 3.0
        new.close()


def test_newcomers_take_nobodys_place_in_the_first_round() -> None:
    settings = {**SKIP, "timeout_seconds": 0.3, "start_timeout_seconds": 0.3}
    with Fleet(2, **settings) as fleet:
        new, _ = entrant(fleet.store, 7, 2, **settings)
        here = [fleet.all[0], new]
        for error in run_threads([lambda c=c: attempt(lambda: play([c], 0, {c.replica: 3.0})) for c in here]):
            assert isinstance(error, RoundAborted) and "missing: replica 1" in str(error)
        new.close()


def test_one_that_is_there_before_the_first_round() -> None:
    with Fleet(2, **SKIP) as fleet:
        new, round = entrant(fleet.store, 3, 2)
        assert round == 0
        outcomes = play([*fleet.all, new], 0, {0: 3.0, 1: 5.0, 3: 10.0})
        assert {outcome.expected_next for outcome in outcomes} in ({(0, 1, 3)}, {(0, 1)}), "in time, or the next one"
        assert len({outcome.mean[0] for outcome in outcomes}) == 1
        new.close()


def test_strict_admits_nobody() -> None:
    with pytest.raises(ValueError, match="replica must be from 0 to 1 in a fleet of 2, got 2 .*only under"):
        join(MemoryStore(), 2, 2)


def test_who_joins_must_fit() -> None:
    with Fleet(2, **SKIP) as fleet:
        with pytest.raises(FleetMismatch, match="replicas: 3 here, 2 in the fleet"):
            entrant(fleet.store, 4, 3)
        with pytest.raises(FleetMismatch, match="codec"):
            entrant(fleet.store, 4, 2, codec="int8")
        assert fleet.store.list("joins/") == []


def test_a_whole_life_ends_with_the_same_bits() -> None:
    """Two train twelve rounds; a third comes in after some, and all end alike."""
    store = MemoryStore()
    settings = {**SKIP, "checkpoint_every": 3, "mode": "sharded", "timeout_seconds": 30.0}
    begun = threading.Event()

    def life(replica: int) -> Toy:
        def trace(step: str) -> None:
            if step == "after:roster" and toy.round == 4:
                begun.set()
            if step == "before:ready" and toy.round == 7 and replica < 2:  # the third has come in by then
                while not store.list("joins/") or not any("/ready/2.json" in key for key in store.list("rounds/")):
                    time.sleep(0.002)

        toy = Toy.fresh(replica)
        if replica == 2:
            assert begun.wait(30)
        return run_toy(toy, join(store, replica, 2, trace=trace, **settings), 12)

    toys = run_threads([lambda r=r: life(r) for r in range(3)])
    assert len({toy.digest for toy in toys}) == 1
    assert toys[2].applied[0][0] >= 3


def test_announcements_that_cannot_be_read_cost_nothing() -> None:
    store = MemoryStore()
    store.put(keys.join(0), b"torn")
    store.put(keys.join(1), b'{"wire":1,"run":"another","replica":9}')
    store.put(keys.join(2), b'{"wire":1,"run":"run","replica":1}')  # one of the first
    here, there = Entrants(store, "run", 2), Entrants(store, "run", 2)
    here.announce(4)
    there.announce(3)
    there.announce(4)
    assert here.look() == there.look() == (0, 1, 3, 4)
    assert len(store.list("joins/")) == 5


def test_announcements_at_once() -> None:
    store = MemoryStore()
    run_threads([lambda r=r: Entrants(store, "run", 2).announce(2 + r) for r in range(6)])
    assert Entrants(store, "run", 2).look() == tuple(range(8)) and len(store.list("joins/")) == 6
