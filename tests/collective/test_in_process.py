"""The fleet of threads: conformance, and that nobody is left waiting."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch

from composer_replication.collective.codec import chunk_bytes
from composer_replication.collective.guards import Guards
from composer_replication.collective.in_process import InProcessCollective, InProcessFleet
from composer_replication.collective.layout import Layout, Slot
from composer_replication.collective.reduce import part_sizes
from composer_replication.errors import Diverged, FleetMismatch, RoundAborted, RoundError, RoundTimeout
from tests.collective import conformance
from tests.collective.conformance import MIXED, SCALAR, begin, contribution, digest, mean_of, snapshot
from tests.support.threads import run_threads


def run(replicas: int, codec: str, script: conformance.Script, guards: Guards | None = None) -> list[Any]:
    fleet = InProcessFleet(replicas, codec=codec, timeout_seconds=30.0, guards=guards)
    return run_threads([partial(script, collective) for collective in fleet.collectives()])


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_conformance(check) -> None:
    check(run)


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8"])
def test_bytes_sent_are_those_computed(codec: str) -> None:
    values = [torch.ones(MIXED.elements)] * 2
    right = sum(chunk_bytes(codec, part_sizes(chunk)) for chunk in MIXED.chunks)
    for seen in run(2, codec, partial(conformance.play, layout=MIXED, values=values)):
        assert seen.bytes_sent == right


def outcomes(fleet: InProcessFleet, *scripts) -> list[BaseException | Any]:
    """What each replica's script gives or raises."""

    def guarded(script, collective: InProcessCollective):
        try:
            return script(collective)
        except Exception as error:
            return error

    pairs = zip(scripts, fleet.collectives(), strict=True)
    return run_threads([partial(guarded, script, collective) for script, collective in pairs])


def one_round(collective: InProcessCollective) -> float:
    begin(collective, SCALAR)
    outcome = collective.average(contribution(collective.replica, 0, SCALAR, torch.ones(1)))
    return mean_of(outcome, SCALAR).item()


def test_a_replica_that_gives_up_ends_the_run_for_all() -> None:
    def gives_up(collective: InProcessCollective) -> None:
        begin(collective, SCALAR)
        collective.fail("out of memory")

    first, _, third = outcomes(InProcessFleet(3, timeout_seconds=30.0), one_round, gives_up, one_round)
    for error in (first, third):
        assert isinstance(error, RoundAborted) and "replica 1 gave up: out of memory" in str(error)
    assert first is not third


def test_a_replica_that_is_closed_while_others_wait() -> None:
    def closes(collective: InProcessCollective) -> None:
        begin(collective, SCALAR)
        collective.close()
        collective.close()
        with pytest.raises(RoundError, match="closed"):
            collective.average(contribution(1, 0, SCALAR, torch.ones(1)))

    first, second = outcomes(InProcessFleet(2, timeout_seconds=30.0), one_round, closes)
    assert second is None
    assert isinstance(first, RoundAborted) and "replica 1 was closed" in str(first)


def test_a_replica_that_never_shows_times_out() -> None:
    def only_starts(collective: InProcessCollective) -> None:
        begin(collective, SCALAR)

    first, _ = outcomes(InProcessFleet(2, timeout_seconds=0.05), one_round, only_starts)
    assert isinstance(first, RoundTimeout) and "replica 1 in round 0" in str(first)
    alone = InProcessFleet(2, timeout_seconds=0.05).collectives()[0]
    with pytest.raises(RoundTimeout, match="replica 1 to start"):
        begin(alone, SCALAR)


def test_an_error_inside_a_chunk_reaches_the_others() -> None:
    def breaks(collective: InProcessCollective) -> None:
        begin(collective, SCALAR)
        # It says that its values are finite, and hands out one that isn't.
        bad = contribution(collective.replica, 0, SCALAR, torch.ones(1))
        bad = type(bad)(bad.round, bad.report, bad.layout, lambda index: torch.tensor([float("nan")]))
        collective.average(bad)

    first, second = outcomes(InProcessFleet(2, timeout_seconds=30.0), one_round, breaks)
    assert isinstance(second, ValueError) and "part 0" in str(second)
    assert isinstance(first, RoundAborted) and "not finite" in str(first)


def test_layouts_that_differ_within_a_round() -> None:
    wider = Layout((*SCALAR.slots, Slot("unfrozen", (2,), "torch.float32")))

    def trains_more(collective: InProcessCollective) -> None:
        begin(collective, SCALAR)
        collective.average(contribution(collective.replica, 0, wider, torch.ones(3)))

    for error in outcomes(InProcessFleet(2, timeout_seconds=30.0), one_round, trains_more):
        assert isinstance(error, FleetMismatch)
        assert "replica 1" in str(error) and "unfrozen: only here" in str(error)


def test_states_that_differ_within_a_round() -> None:
    def begins_elsewhere(collective: InProcessCollective) -> None:
        begin(collective, SCALAR)
        other = contribution(collective.replica, 1, SCALAR, torch.ones(1))  # its base is that of round 1
        collective.average(type(other)(0, other.report, other.layout, other.chunk))

    for error in outcomes(InProcessFleet(2, timeout_seconds=30.0), one_round, begins_elsewhere):
        assert isinstance(error, Diverged) and "replica 1" in str(error) and digest(1) in str(error)


def resume_at(round: int, base: str | None = None):
    def script(collective: InProcessCollective):
        offered = snapshot(SCALAR, round, torch.tensor([5.0 + collective.replica]))
        if base is not None:
            offered = type(offered)(
                round=round,
                layout=offered.layout,
                anchor=offered.anchor,
                momentum=offered.momentum,
                state=offered.state,
                digest=base,
            )
        got = collective.start(offered, settings={}, resumed=True)
        assert got is offered
        outcome = collective.average(contribution(collective.replica, round, SCALAR, torch.ones(1)))
        return outcome.round

    return script


def test_resuming() -> None:
    def fresh(collective: InProcessCollective):
        got = collective.start(snapshot(SCALAR, 0), settings={}, resumed=False)
        collective.average(contribution(collective.replica, got.round, SCALAR, torch.ones(1)))
        return got.round, got.anchor[0].item(), len(got.momentum)

    assert outcomes(InProcessFleet(2), resume_at(4), resume_at(4)) == [4, 4]
    assert outcomes(InProcessFleet(2), fresh, resume_at(4)) == [(4, 6.0, 1), 4]
    for pair in ((resume_at(4), resume_at(5)), (resume_at(4), resume_at(4, "another"))):
        for error in outcomes(InProcessFleet(2), *pair):
            assert isinstance(error, Diverged) and "replica 1 resumes at round" in str(error)


def test_misuse() -> None:
    with pytest.raises(ValueError, match="replicas must be at least 1, got 0"):
        InProcessFleet(0)
    with pytest.raises(ValueError, match="timeout_seconds .* got 0"):
        InProcessFleet(1, timeout_seconds=0)
    with pytest.raises(ValueError, match="did you mean 'int8'"):
        InProcessFleet(1, codec="int-8")
    alone = InProcessFleet(1).collectives()[0]
    with pytest.raises(RoundError, match=r"start\(\) comes before"):
        alone.average(contribution(0, 0, SCALAR, torch.ones(1)))
    begin(alone, SCALAR)
    with pytest.raises(RoundError, match="started already"):
        begin(alone, SCALAR)
    with pytest.raises(RoundError, match="round 3 isn't open"):
        alone.average(contribution(0, 3, SCALAR, torch.ones(1)))


def test_following_the_end_and_beyond() -> None:
    fleet = InProcessFleet(1)
    alone = fleet.collectives()[0]
    begin(alone, SCALAR)
    assert alone.follow(0, SCALAR, digest(0), wait=False) is None
    outcome = alone.average(contribution(0, 0, SCALAR, torch.ones(1), leaving=True))
    assert outcome.expected_next == ()
    again = alone.follow(0, SCALAR, digest(0), wait=True)
    assert again is not None and again.members == outcome.members
    with pytest.raises(RoundError, match="the run is over"):
        alone.follow(1, SCALAR, digest(1), wait=True)
    alone.publish({"loss": 1.0})
    alone.finish(digest(1), {"rounds": 1})
    alone.close()
    assert fleet.status == {0: {"loss": 1.0}} and fleet.results == {0: (digest(1), {"rounds": 1})}


def test_old_rounds_are_forgotten() -> None:
    fleet = InProcessFleet(2, timeout_seconds=30.0)
    most = []

    def many(collective: InProcessCollective) -> None:
        begin(collective, SCALAR)
        for round in range(20):
            collective.average(contribution(collective.replica, round, SCALAR, torch.ones(1)))
            with threading.Lock():
                most.append(len(fleet._meeting.rounds))

    assert outcomes(fleet, many, many) == [None, None]
    assert max(most) <= 2
