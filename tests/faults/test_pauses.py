"""A replica that stops at a step, for longer than anyone waits, and then goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from composer_replication.errors import RoundError, StoreError
from composer_replication.store import MemoryStore
from tests.collective.object_store import lives
from tests.collective.object_store.toy import Toy
from tests.faults.fleet import Fleet, agree, nothing_lost
from tests.faults.registry import Case, covers

ROUNDS = 8  # under skip the others pass so many that the round's blobs are collected meanwhile


@covers("paused, woken")
def test_paused_past_the_round_then_woken(case: Case, tmp_path: Path) -> None:
    step, victim = case.point
    skip = case.policy == "skip"
    store, woken = MemoryStore(), threading.Event()
    waits = {"timeout_seconds": 0.8, "start_timeout_seconds": 30.0}
    every = {"checkpoint_every": 2, "tolerated_misses": 0} if skip else {}
    fleet = Fleet(tmp_path, store, policy=case.policy, rounds=ROUNDS if skip else 4, **waits, **every)
    stopped = threading.Event()

    def hook(at: str, toy: Toy) -> None:
        if at == step and toy.round >= 1:
            stopped.set()
            assert woken.wait(timeout=60)

    def others_hook(at: str, toy: Toy) -> None:
        if at == "before:roster" and step.endswith(at.partition(":")[2]) and toy.round >= 1:
            assert stopped.wait(timeout=60)  # whoever is first makes the roster: let it be the one that hangs

    paused = fleet.start(victim, hook)
    running = [fleet.start(i, others_hook) for i in range(3) if i != victim]
    others = [life.join() for life in running]
    assert stopped.wait(timeout=60), f"{step} was never reached"
    woken.set()
    back = paused.join()
    agree([back, *others])
    # It is told that the fleet has gone on without it, or ends with the rest; never anything else.
    assert back.digest or isinstance(back.error, RoundError | StoreError), back.text
    if skip:
        assert all(life.digest for life in others), [life.text for life in others]
        return
    again = fleet.run(timeout_seconds=30.0)
    assert all(life.digest for life in again), [life.text for life in again]
    nothing_lost(store, [back, *others, *again])


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _stands(pid: int | None, step: str) -> None:
    """Wait until a process has stopped itself."""
    assert pid is not None
    give_up = time.monotonic() + 60
    while _state(pid) != "T":
        assert time.monotonic() < give_up, f"{step} was never reached"
        time.sleep(0.005)


@pytest.mark.processes
@covers("stopped, woken")
def test_a_stopped_process_is_woken_when_the_run_is_over(case: Case, tmp_path: Path) -> None:
    step, victim = case.point
    settings = {"failure_policy": "skip", "timeout_seconds": 0.6, "start_timeout_seconds": 40.0, "tolerated_misses": 0}
    fleet = lives.Fleet(tmp_path, rounds=ROUNDS, settings=settings)
    stopped = fleet.start(victim, lives.Kill(step, 1, last="roster" in step, signal=signal.SIGSTOP))
    others = {i: fleet.start(i) for i in range(3) if i != victim}
    try:
        for replica, process in others.items():
            assert lives.join(process) == 0, fleet.ended(replica)
        _stands(stopped.pid, step)
    finally:
        os.kill(stopped.pid or 0, signal.SIGCONT)
    code = lives.join(stopped)
    ended = fleet.ended(victim)
    rest = [fleet.ended(replica) for replica in others]
    assert rest[0]["applied"] == rest[1]["applied"] and len(rest[0]["applied"]) == ROUNDS
    mine = ended.get("applied", [])
    assert mine == rest[0]["applied"][: len(mine)]
    if code == 0:
        assert ended["digest"] == rest[0]["digest"]
    else:
        assert ended["error"] in ("Diverged", "RoundError", "RoundTimeout"), ended


@pytest.mark.processes
@covers("one id, two processes")
def test_a_process_whose_id_was_taken_over_is_woken(case: Case, tmp_path: Path) -> None:
    """It stops, as a machine does that swaps; its id is given to another machine, which ends the run; it wakes."""
    step, victim = case.point
    fleet = lives.Fleet(tmp_path, rounds=4)
    stopped = fleet.start(victim, lives.Kill(step, 1, last="roster" in step, signal=signal.SIGSTOP), machine="one")
    others = {i: fleet.start(i) for i in range(3) if i != victim}
    _stands(stopped.pid, step)
    assert stopped.pid is not None
    try:
        successor = fleet.start(victim, fresh=True, salt=1, machine="two")
        for replica, process in {**others, victim: successor}.items():
            assert lives.join(process) == 0, fleet.ended(replica)
        good = fleet.ended(victim)
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    before = {key: fleet.store.get(key) for key in fleet.store.list("") if not key.startswith(("members/", "claims/"))}
    lives.join(stopped)
    ended = fleet.ended(victim)
    assert ended.get("error") in ("Fenced", "Diverged") or ended.get("digest") == good["digest"], ended
    if ended.get("error") == "Fenced":
        assert f"replica {victim}" in ended["text"] and "not to be restarted" in ended["text"]
    assert len({fleet.result(replica)["digest"] for replica in range(3)}) == 1
    after = {key: fleet.store.get(key) for key in before if key in set(fleet.store.list(""))}
    changed = [key for key in after if after[key] != before[key] and not key.startswith("results/")]
    assert changed == [], "it has overwritten what the fleet relied on"
