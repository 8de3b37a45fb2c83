"""kill -9 of any replica at any step of the protocol, then a restart: the bits are those of an undisturbed run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from composer_replication.collective.in_process import InProcessFleet
from tests.collective.object_store.lives import Fleet, Kill, join
from tests.collective.object_store.toy import Toy, run_toy
from tests.faults.registry import Case, covers
from tests.support.threads import run_threads

pytestmark = pytest.mark.processes

ROUNDS = 4
START_STEPS = {"claim", "fleet"}


@cache
def undisturbed() -> str:
    collectives = InProcessFleet(3, codec="int8").collectives()
    toys = run_threads([lambda c=c: run_toy(Toy.fresh(c.replica), c, ROUNDS) for c in collectives])
    return toys[0].digest


def place(case: Case, folder: Path, request: pytest.FixtureRequest) -> Fleet:
    if case.store == "files":
        return Fleet(folder)
    uri, credentials = request.getfixturevalue("s3_uri"), request.getfixturevalue("s3_credentials")
    return Fleet(folder, uri=uri, environment=credentials)


def kill_and_restart(fleet: Fleet, step: str, victim: int, mode: str, *, fresh: bool) -> None:
    fleet = replace(fleet, rounds=ROUNDS, settings={"mode": mode})
    name = step.partition(":")[2]
    last = name in ("result", "final")
    round = 0 if name in START_STEPS else ROUNDS if last else 1
    # The last one to declare itself finds everybody there and proposes; the last one to end closes the run.
    first = fleet.start(victim, Kill(step, round, last=name in ("roster", "final")))
    others = {i: fleet.start(i) for i in range(fleet.replicas) if i != victim}
    assert join(first) == -9, f"{step} was never reached: {fleet.ended(victim)}"
    assert join(fleet.start(victim, fresh=fresh)) == 0, fleet.ended(victim)
    for replica, process in others.items():
        assert join(process) == 0, fleet.ended(replica)
    assert {fleet.result(replica)["digest"] for replica in range(fleet.replicas)} == {undisturbed()}
    assert undisturbed().encode() in fleet.store.get("final.json")


def test_an_undisturbed_fleet_of_processes_gives_the_bits_of_threads(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, rounds=ROUNDS)
    processes = [fleet.start(replica) for replica in range(3)]
    assert [join(process) for process in processes] == [0, 0, 0]
    assert {fleet.ended(replica)["digest"] for replica in range(3)} == {undisturbed()}
    assert b'"rounds":4' in fleet.store.get("final.json")


@covers("killed, restarted")
def test_killed_and_restarted(case: Case, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    step, victim, mode = case.point
    kill_and_restart(place(case, tmp_path, request), step, victim, mode, fresh=False)


@pytest.mark.parametrize(("step", "victim"), [("after:ready", 1), ("before:applied", 0)])
def test_killed_and_come_back_without_its_record(tmp_path: Path, step: str, victim: int) -> None:
    """It joins from the fleet's checkpoint, follows, and finds its contribution: still the same bits."""
    kill_and_restart(Fleet(tmp_path), step, victim, "sharded", fresh=True)


SKIP = {"failure_policy": "skip", "timeout_seconds": 1.6, "start_timeout_seconds": 40.0, "tolerated_misses": 0}


@covers("killed, not restarted")
def test_skip_goes_on_without_it(case: Case, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    step, victim = case.point
    fleet = replace(place(case, tmp_path, request), rounds=ROUNDS, settings=SKIP)
    name = step.partition(":")[2]
    first = fleet.start(
        victim, Kill(step, ROUNDS if name in ("result", "final") else 1, last=name in ("roster", "final"))
    )
    others = {i: fleet.start(i) for i in range(3) if i != victim}
    assert join(first) == -9, fleet.ended(victim)
    for replica, process in others.items():
        assert join(process) == 0, fleet.ended(replica)
    a, b = (fleet.ended(replica)["applied"] for replica in others)
    assert a == b and len(a) == ROUNDS


def test_skip_takes_it_back_in(tmp_path: Path) -> None:
    """The killed replica returns without a record, joins from a checkpoint, and ends with the rest."""
    fleet = Fleet(tmp_path, rounds=12, settings=SKIP)
    first = fleet.start(1, Kill("after:upload", 2))
    others = {i: fleet.start(i) for i in (0, 2)}
    assert join(first) == -9
    back = fleet.start(1, fresh=True)
    for replica, process in {**others, 1: back}.items():
        assert join(process) == 0, fleet.ended(replica)
    assert len({fleet.ended(replica)["digest"] for replica in range(3)}) == 1
