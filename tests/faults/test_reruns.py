"""An interval that is trained again comes out otherwise, and what the dead process had sent arrives late: whatever is
in the store counts, once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from composer_replication.store import MemoryStore, ObjectStore, open_store
from tests.collective.object_store.toy import Toy
from tests.faults.fleet import Fleet, Hook, Killed, Line, nothing_lost
from tests.faults.registry import Case, covers


def store_for(case: Case, request: pytest.FixtureRequest) -> ObjectStore:
    return MemoryStore() if case.store == "memory" else open_store(request.getfixturevalue("s3_uri"))


def waiting(for_it: threading.Event) -> Hook:
    """Whoever is first makes the roster: let it be the victim, in round 1."""

    def hook(at: str, toy: Toy) -> None:
        if at == "before:roster" and toy.round == 1:
            assert for_it.wait(timeout=60)

    return hook


@covers("another contribution")
def test_an_interval_that_comes_out_otherwise(case: Case, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    step, victim = case.point
    store, killed = store_for(case, request), threading.Event()
    fleet = Fleet(tmp_path, store, policy=case.policy)

    def die(at: str, toy: Toy) -> None:
        if at == step and toy.round == 1:
            killed.set()
            raise Killed

    first = fleet.start(victim, die)
    running = [fleet.start(i, waiting(killed)) for i in range(3) if i != victim]
    dead = first.join()
    assert dead.killed, dead.text
    again = fleet.start(victim, salt=1)
    lives = [life.join() for life in (again, *running)]
    assert [life.text for life in lives] == ["", "", ""]
    assert len(nothing_lost(store, [dead, *lives])) == 4


LATE: dict[str, Callable[[str], bool]] = {
    "input": lambda key: "rounds/00000001/" in key and "/in/" in key,
    "ready": lambda key: "rounds/00000001/" in key and "/ready/" in key,
    "roster": lambda key: key == "rounds/00000001/0/roster.json",
    "output": lambda key: "rounds/00000001/" in key and "/out/" in key,
    "mean": lambda key: "rounds/00000001/" in key and "/mean/" in key,
}


@covers("late write")
def test_a_write_of_the_dead_arrives_late(case: Case, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    what, when, victim = case.point
    store, killed = store_for(case, request), threading.Event()
    fleet = Fleet(tmp_path, store, policy=case.policy)
    line = Line(store, LATE[what])
    first = fleet.start(victim, line=line)
    running = [fleet.start(i, waiting(killed)) for i in range(3) if i != victim]
    dead = first.join()
    assert dead.killed and len(line.kept) == 1, dead.text
    if when == "before the restart":
        line.deliver()

    def deliver(at: str, toy: Toy) -> None:
        if when == "after the restart's own" and toy.round == 1 and at == f"after:{_STEP[what]}":
            line.deliver()

    again = fleet.start(victim, deliver, salt=1)
    killed.set()
    lives = [life.join() for life in (again, *running)]
    line.deliver()
    assert [life.text for life in lives] == ["", "", ""]
    assert len(nothing_lost(store, [dead, *lives])) == 4


_STEP = {"input": "upload", "ready": "ready", "roster": "roster", "output": "reduce", "mean": "mean"}
