"""Who comes, leaves, is late or can't be averaged, several at once; and what lasts when the checkpoints are rare."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from composer_replication.collective.base import Contribution
from composer_replication.errors import ObjectCorrupt, RoundAborted, StoreError
from composer_replication.store import LocalStore, MemoryStore
from tests.collective.object_store.toy import Toy
from tests.faults.fleet import Fleet, Killed, Life, agree, nothing_lost, wait_for
from tests.faults.registry import Case, covers


class Spoilt(Toy):
    """Trains to what `value` says in round 1."""

    value = 0.0

    def train(self) -> list[torch.Tensor]:
        moved = super().train()
        if self.round == 1:
            moved[0].fill_(self.value)
        return moved

    def contribution(self, *, leaving: bool = False, **changes: object) -> Contribution:
        finite = self.round != 1 or bool(torch.isfinite(torch.tensor(self.value)))
        return super().contribution(leaving=leaving, finite=finite, **changes)


def spoilt(value: float) -> type[Toy]:
    return type("Spoilt", (Spoilt,), {"value": value})


@covers("sum overflows")
def test_finite_inputs_whose_sum_overflows(case: Case, tmp_path: Path) -> None:
    codec, mode = case.point
    store = MemoryStore()
    fleet = Fleet(tmp_path, store, policy=case.policy, codec=codec, mode=mode)
    fleet.make = spoilt(2.0**127)
    lives = fleet.run()
    assert [life.text for life in lives] == ["", "", ""]
    after = nothing_lost(store, lives, codec=codec)
    assert len(after) == 4 and all(
        torch.isfinite(tensor).all() for tensor in Toy.load(0, tmp_path / "record-0.pt").anchor
    )


@covers("nobody finite")
def test_nobody_is_finite(case: Case, tmp_path: Path) -> None:
    store = MemoryStore()
    fleet = Fleet(tmp_path, store, policy=case.policy)
    fleet.make = spoilt(float("nan"))
    lives = fleet.run()
    assert [life.text for life in lives] == ["", "", ""]
    after = nothing_lost(store, lives)
    assert len(after) == 4
    assert not [key for key in store.list("rounds/00000001/") if "/in/" in key], "nothing that isn't finite is written"


@covers("rare checkpoints")
def test_checkpoints_rarer_than_rounds_are_collected(case: Case, tmp_path: Path) -> None:
    """A replica that has lost its record joins from the first weights, through every round since."""
    store = MemoryStore()
    fleet = Fleet(tmp_path, store, policy=case.policy, rounds=12, checkpoint_every=50)

    def die(step: str, toy: Toy) -> None:
        if step == "after:ready" and toy.round == 10:
            raise Killed

    running = [fleet.start(i) for i in (0, 1)]
    dead = fleet.start(2, die).join()
    assert dead.killed
    back = fleet.start(2, fresh=True).join()
    lives = [*(life.join() for life in running), back]
    assert [life.text for life in lives] == ["", "", ""]
    assert [round for round, _ in back.applied] == list(range(12))
    assert len(nothing_lost(store, [dead, *lives])) == 12


@covers("all at once")
def test_one_comes_back_one_leaves_and_one_is_late_in_the_same_round(case: Case, tmp_path: Path) -> None:
    store = MemoryStore()
    fleet = Fleet(tmp_path, store, policy="skip", replicas=5, rounds=9, timeout_seconds=0.5, start_timeout_seconds=30.0)
    woken = threading.Event()

    def hang(step: str, toy: Toy) -> None:
        if step == "before:ready" and toy.round == 3:
            assert woken.wait(timeout=60)

    def die(step: str, toy: Toy) -> None:
        if step == "after:upload" and toy.round == 2:
            raise Killed

    early = Fleet(tmp_path, store, policy="skip", replicas=5, rounds=4, **fleet.settings | {"failure_policy": "skip"})
    running = {0: fleet.start(0), 1: fleet.start(1), 2: fleet.start(2, hang), 3: early.start(3)}
    dead = fleet.start(4, die).join()
    assert dead.killed
    running[4] = fleet.start(4, fresh=True)
    wait_for(lambda: any(key.startswith("rounds/00000004/0/roster") for key in store.list("rounds/00000004/")))
    woken.set()
    lives = [running[replica].join() for replica in range(5)]
    assert [life.text for life in lives] == [""] * 5
    after = nothing_lost(store, [dead, *lives])
    assert len(after) == 9 and lives[3].applied[-1][0] == 8, "who has left follows to the end"


@covers("all fresh")
def test_all_come_back_without_their_records(case: Case, tmp_path: Path) -> None:
    store = MemoryStore()
    fleet = Fleet(tmp_path, store, policy=case.policy, rounds=7, checkpoint_every=2)

    def die(step: str, toy: Toy) -> None:
        if toy.round == 5 and step == "before:upload":
            raise Killed

    first = fleet.run(dict.fromkeys(range(3), die))
    assert all(life.killed for life in first)
    again = fleet.run(fresh=True)
    assert [life.text for life in again] == ["", "", ""]
    assert len(agree([*first, *again])) == 7


@covers("folder gone")
def test_the_folder_of_one_is_gone(case: Case, tmp_path: Path) -> None:
    """It stops and says so, and writes nothing into the empty place; the others go by their policy."""
    (tmp_path / "mount").mkdir()
    mine, theirs = tmp_path / "mount" / "store", tmp_path / "store"
    LocalStore(theirs)
    mine.symlink_to(theirs)
    step, skip = case.point, case.policy == "skip"
    waits = {"timeout_seconds": 1.0, "start_timeout_seconds": 30.0, "tolerated_misses": 0}
    fleet = Fleet(tmp_path, lambda replica: LocalStore(mine if replica == 1 else theirs), policy=case.policy, **waits)

    def unmount(at: str, toy: Toy) -> None:
        if at == step and toy.round == 1 and mine.is_symlink():
            mine.unlink(missing_ok=True)  # steps of several chunks come at the same time

    lives = fleet.run({1: unmount})
    assert isinstance(lives[1].error, StoreError) and str(mine) in lives[1].text and not mine.exists(), lives[1].text
    agree(lives)
    for life in (lives[0], lives[2]):
        if skip:
            assert life.digest, life.text
        else:
            assert isinstance(life.error, RoundAborted) and "missing: replica 1" in life.text, life.text
    mine.symlink_to(theirs)
    if not skip:
        again = fleet.run(timeout_seconds=30.0)
        assert [life.text for life in again] == ["", "", ""]
        nothing_lost(LocalStore(theirs), [*lives, *again])


@covers("alone")
def test_the_first_one_is_alone_for_long(case: Case, tmp_path: Path) -> None:
    """Alone it is never the fleet: it waits, gives up by its deadline, and is there when the others come."""
    store = MemoryStore()
    fleet = Fleet(tmp_path, store, policy=case.policy, start_timeout_seconds=0.3, timeout_seconds=0.3)
    alone: list[Life] = [fleet.live(0), fleet.live(0, salt=1)]
    for life in alone:
        assert isinstance(life.error, RoundAborted) and "missing: replica 1, 2" in life.text, life.text
        assert life.applied == []
    lives = fleet.run(salt=2, start_timeout_seconds=30.0, timeout_seconds=30.0)
    assert [life.text for life in lives] == ["", "", ""]
    assert len(nothing_lost(store, [*alone, *lives])) == 4


@covers("corrupt after commit")
def test_a_contribution_is_damaged_when_its_round_is_decided(case: Case, tmp_path: Path) -> None:
    store = MemoryStore()
    fleet = Fleet(tmp_path, store, policy=case.policy, mode=case.point, rounds=3)
    done = threading.Event()

    def spoil(step: str, toy: Toy) -> None:
        if step == "after:roster" and toy.round == 1 and not done.is_set():
            done.set()
            for key in store.list("rounds/00000001/0/in/1."):
                data = store.get(key)
                store.put(key, data[:-1] + bytes([data[-1] ^ 1]))

    lives = fleet.run(dict.fromkeys(range(3), spoil))
    after = agree(lives)
    told = [life.text for life in lives if life.error is not None]
    if case.policy == "skip":
        # Where all read everything, some may have read it before: they go on, and whoever hasn't can't, and says so.
        assert told == [] or case.point == "direct", told
        assert all(isinstance(life.error, ObjectCorrupt) for life in lives if life.error is not None), told
        assert all("rounds/00000001/0/in/1." in text for text in told) and len(told) < 3, told
        assert len(after) == 3
        return
    assert all(isinstance(life.error, RoundAborted) for life in lives) or told == [], told
    assert all("rounds/00000001/0/in/1." in text for text in told), told
    again = fleet.run(fresh=False)
    assert [life.text for life in again] == ["", "", ""]
    agree([*lives, *again])
