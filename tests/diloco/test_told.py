"""What replicas tell of their intervals: train_seconds of this one, waiting and bytes of the one before."""

from __future__ import annotations

from typing import Any

import pytest

from composer_replication.collective.in_process import InProcessFleet
from composer_replication.diloco.told import TIMES, IntervalClock, of_before
from tests.diloco.test_loop import Replica, make_replica
from tests.support.threads import run_threads

LAST = {"last_wait_seconds", "last_exchange_seconds", "last_bytes_sent", "last_bytes_received", "last_drift"}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def trained(*, tell_times: bool) -> tuple[list[Replica], Any]:
    """Two replicas, three rounds of four steps; a step of replica 1 takes three seconds, one of replica 0 one."""
    fleet = InProcessFleet(2)
    clocks = [Clock(), Clock()]
    replicas = [
        make_replica(collective, clock=clock, tell_times=tell_times, batches=12)
        for collective, clock in zip(fleet.collectives(), clocks, strict=True)
    ]

    def train(replica: Replica, clock: Clock) -> Replica:
        def step(done: int) -> None:
            clock.now += 3.0 if replica.loop.replica else 1.0

        replica.run(before=step)
        replica.loop.finish(replica.preview())
        return replica

    done = run_threads([lambda r=r, c=c: train(r, c) for r, c in zip(replicas, clocks, strict=True)])
    return done, fleet.results


def test_each_report_tells_its_interval_and_the_round_before() -> None:
    replicas, results = trained(tell_times=True)
    rounds = [replica.summaries for replica in replicas]
    for index, own in enumerate(rounds):
        assert [s.member_metrics[index]["train_seconds"] for s in own] == [12.0 if index else 4.0] * 3
        assert not [name for name in own[0].member_metrics[index] if of_before(name)]
        for before, after in zip(own, own[1:], strict=False):
            told = after.member_metrics[index]
            assert told.keys() >= LAST
            assert told["last_bytes_sent"] == before.bytes_sent > 0
            assert told["last_bytes_received"] == before.bytes_received
            assert told["last_wait_seconds"] == before.wait_seconds
            assert told["last_exchange_seconds"] == before.exchange_seconds
            assert told["last_drift"] == before.drift
        last = results[index][1]["last"]
        assert last["round"] == 2 and last["last_bytes_sent"] == own[-1].bytes_sent


def test_times_that_mean_nothing_are_left_out_and_decide_nothing() -> None:
    timed, _ = trained(tell_times=True)
    untimed, results = trained(tell_times=False)
    assert untimed[0].loop.digest == timed[0].loop.digest == timed[1].loop.digest
    for summary in untimed[0].summaries:
        for told in summary.member_metrics.values():
            assert not TIMES & told.keys()
    assert "last_bytes_sent" in untimed[0].summaries[1].member_metrics[0]
    assert not TIMES & results[0][1]["last"].keys()


def test_waiting_is_no_part_of_an_interval_and_a_restart_is() -> None:
    clock = Clock()
    one = IntervalClock(clock)
    one.begin()
    clock.now += 5
    one.end()
    clock.now += 100  # waiting for the others
    assert one.seconds == 5
    again = IntervalClock(clock)  # in the process that goes on from a checkpoint
    again.end(one.seconds)
    clock.now += 100  # and waits for the fleet
    again.go_on()
    clock.now += 2
    again.end()
    assert again.seconds == pytest.approx(7)


def test_a_checkpoint_keeps_what_is_still_to_be_told() -> None:
    replicas, _ = trained(tell_times=True)
    state = replicas[0].loop.state_dict()
    other = make_replica(InProcessFleet(2).collectives()[0])
    other.loop._restore_state(state)
    again = other.loop.state_dict()["interval"]
    assert again["told"] == state["interval"]["told"] and again["told"].keys() >= LAST - {"last_drift"}
