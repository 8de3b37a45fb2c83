"""A whole fleet that is resumed as another one: from where, by how many, and what becomes of those who wake up late."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_replication.collective.object_store import keys
from composer_replication.collective.object_store.epochs import EpochStore, current, read_epochs
from composer_replication.collective.object_store.sealing import begin_epoch, reach
from composer_replication.collective.object_store.wire import dump, load
from composer_replication.errors import Fenced, FleetMismatch, ObjectCorrupt, ReplicaTaken
from composer_replication.store import MemoryStore
from tests.collective.conformance import SCALAR, begin, contribution, digest, snapshot
from tests.collective.object_store.helpers import Fleet, attempt, join, scalar
from tests.collective.object_store.toy import Toy, run_toy
from tests.support.threads import run_threads

SETTINGS: dict[str, Any] = {"checkpoint_every": 3, "mode": "sharded"}
BESIDE = ("before:checkpoint", "after:checkpoint")  # in a thread of its own


class Killed(BaseException):
    """Ends a replica where it is, as signal 9 would: nothing catches it."""


def bury(store: MemoryStore, replicas: int, prefix: str = "") -> None:
    """What the claims and heartbeats of killed processes look like to another machine."""
    for replica in range(replicas):
        for key in store.list(f"{prefix}claims/{replica}/"):
            if not key.endswith("closed"):
                store.put(key, json.dumps({"host": "far-away", "boot": "b", "namespace": "n", "pid": 7}).encode())
            else:
                store.delete([key])
        store.put(
            f"{prefix}members/{replica}.json",
            b'{"incarnation":1,"counter":9,"heartbeat_seconds":0.02,"host":"far-away"}',
        )


def killed(store: MemoryStore, folder: Path, replicas: int, round: int, step: str = "before:ready") -> list[Toy]:
    """A fleet that is killed at a step of `round`, and its records."""
    gone = threading.Event()

    def life(replica: int) -> Toy:
        toy = Toy.fresh(replica)

        def trace(at: str) -> None:
            if (gone.is_set() and at not in BESIDE) or (at == step and toy.round == round):
                gone.set()
                raise Killed

        try:
            run_toy(toy, join(store, replica, replicas, trace=trace, **SETTINGS), 100, save=folder / f"{replica}.pt")
        except Killed:
            pass
        return Toy.load(replica, folder / f"{replica}.pt")

    toys = run_threads([lambda r=r: life(r) for r in range(replicas)])
    bury(store, replicas)
    return toys


def resume(store: MemoryStore, folder: Path, replicas: int, rounds: int, **settings: Any) -> list[Toy]:
    """Every replica that has a record goes on from it, the others come without."""

    def life(replica: int) -> Toy:
        record = folder / f"{replica}.pt"
        toy = Toy.load(replica, record) if record.exists() else Toy.fresh(replica)
        collective = join(store, replica, replicas, **{**SETTINGS, **settings})
        return run_toy(toy, collective, rounds, resumed=record.exists(), save=record)

    return run_threads([lambda r=r: life(r) for r in range(replicas)])


@pytest.mark.parametrize("size", [1, 2, 5])
def test_resuming_with_another_number_of_replicas(tmp_path: Path, size: int) -> None:
    store = MemoryStore()
    before = killed(store, tmp_path, 3, 7)
    assert max(toy.round for toy in before) == 7
    epoch = begin_epoch(store, size)
    assert (epoch.number, epoch.first, epoch.replicas) == (1, 7, size), "the newest checkpoint, and the rounds since"
    toys = resume(store, tmp_path, size, 12)
    assert len({toy.digest for toy in toys}) == 1 and len(toys) == size
    first = [toy for toy in toys if toy.replica >= 3]
    assert all(toy.applied[0][0] in (3, 6) for toy in first), "newcomers follow the old fleet's last rounds"
    view = current(store)
    rosters = [json.loads(view.get(keys.roster(round, 0))) for round in range(12)]
    sizes = [len(roster["members"]) for roster in rosters]
    assert sizes == [3] * 7 + [size] * 5
    assert [r["prev"] == "" for r in rosters] == [False] * 12
    assert json.loads(view.get("final.json"))["replicas"] == list(range(size))
    assert json.loads(view.get(keys.FLEET))["replicas"] == size and json.loads(store.get(keys.FLEET))["replicas"] == 3


def test_without_any_record(tmp_path: Path) -> None:
    store = MemoryStore()
    whole = killed(store, tmp_path, 3, 7)
    for record in tmp_path.iterdir():
        record.unlink()
    begin_epoch(store, 3)
    toys = resume(store, tmp_path, 3, 9)
    assert len({toy.digest for toy in toys}) == 1
    reached = max(whole, key=lambda toy: toy.round)
    assert reached.round == 7 and dict(toys[0].applied)[6] == reached.digest, "the state that was reached"


def test_a_state_that_cannot_be_followed_is_given_up(tmp_path: Path) -> None:
    """Rounds beyond the last checkpoint whose contents are lost: the run goes on before them."""
    store = MemoryStore()
    killed(store, tmp_path, 2, 8)
    lost = [key for key in store.list("rounds/00000006/") if "/in/" in key or "/out/" in key]
    store.delete(lost)
    assert reach(store) is not None and reach(store).followed == 6  # type: ignore[union-attr]
    for record in tmp_path.iterdir():
        record.unlink()
    epoch = begin_epoch(store, 2)
    assert epoch.first == 6 and epoch.sealed == (8, 0)
    toys = resume(store, tmp_path, 2, 9)
    assert len({toy.digest for toy in toys}) == 1 and [r for r, _ in toys[0].applied] == [6, 7, 8]
    assert "epochs/1/" + keys.roster(6, 0) in store.list("epochs/1/"), "round 6 is averaged anew, with its own roster"
    assert json.loads(store.get(keys.roster(8, 0)))["kind"] == "sealed"


def test_a_damaged_round_since_the_newest_checkpoint(tmp_path: Path) -> None:
    """Nobody gets past it, however often the fleet is started; the error says how, and that works."""
    store = MemoryStore()
    killed(store, tmp_path, 2, 8)
    for record in tmp_path.iterdir():
        record.unlink()
    for key in store.list("rounds/00000006/"):
        if keys.is_blob(key):
            store.put(key, store.get(key)[:-1] + b"?")
    with pytest.raises(ObjectCorrupt, match=r"delete what lies in rounds/00000006/\*/in/ and .*launch --resume"):
        run_toy(Toy.fresh(0), join(store, 0, 2, **SETTINGS), 10)
    store.delete([key for key in store.list("rounds/00000006/") if "/in/" in key or "/out/" in key])
    assert begin_epoch(store, 2).first == 6
    assert len({toy.digest for toy in resume(store, tmp_path, 2, 9)}) == 1


def test_nothing_older_than_the_newest_checkpoint_is_taken(tmp_path: Path) -> None:
    store = MemoryStore()
    killed(store, tmp_path, 2, 5)
    store.delete([key for key in store.list(keys.checkpoint(3)) if not key.endswith(".json")])
    store.delete([key for key in store.list("rounds/00000001/") if "/in/" in key or "/out/" in key])
    found = reach(store)
    assert found is not None and (found.newest, found.checkpoint) == (3, 0)
    with pytest.raises(ObjectCorrupt, match=r"newest checkpoint \(round 3 .*isn't whole"):
        begin_epoch(store, 2)
    assert reach(store) == found, "nothing was sealed"
    store.delete([key for key in store.list(keys.checkpoint(0)) if not key.endswith(".json")])
    with pytest.raises(ObjectCorrupt, match="no checkpoint that is whole"):
        begin_epoch(store, 2)


def test_several_epochs(tmp_path: Path) -> None:
    store = MemoryStore()
    killed(store, tmp_path, 2, 4)
    begin_epoch(store, 3)
    gone = threading.Event()

    def life(replica: int) -> None:
        record = tmp_path / f"{replica}.pt"
        toy = Toy.load(replica, record) if record.exists() else Toy.fresh(replica)

        def trace(at: str) -> None:
            if (gone.is_set() and at not in BESIDE) or (at == "after:ready" and toy.round == 6):
                gone.set()
                raise Killed

        try:
            collective = join(store, replica, 3, trace=trace, **SETTINGS)
            run_toy(toy, collective, 100, resumed=record.exists(), save=record)
        except Killed:
            pass

    run_threads([lambda r=r: life(r) for r in range(3)])
    bury(store, 3, "epochs/1/")
    epoch = begin_epoch(store, 2)
    assert epoch.number == 2 and epoch.first == 6
    toys = resume(store, tmp_path, 2, 8)
    assert len({toy.digest for toy in toys}) == 1
    view = current(store)
    sizes = [len(json.loads(view.get(keys.roster(round, 0)))["members"]) for round in range(8)]
    assert sizes == [2, 2, 2, 2, 3, 3, 2, 2]
    listed = [keys.manifest_round(key) for key in view.list("checkpoints/")]
    assert [round for round in listed if round is not None] == [0, 3, 8]


def test_an_epoch_that_nobody_has_started_in(tmp_path: Path) -> None:
    """Its launcher was stopped just then, and the run is resumed with yet another number."""
    store = MemoryStore()
    killed(store, tmp_path, 2, 4)
    for size in (3, 4, 2):
        epoch = begin_epoch(store, size)
    assert (epoch.number, epoch.first) == (3, 4)
    with pytest.raises(FleetMismatch, match="settings.outer_lr: 0.5 here"):
        join(store, 0, 2, **SETTINGS).start(Toy.fresh(0).snapshot(), settings={"outer_lr": 0.5}, resumed=False)
    assert len({toy.digest for toy in resume(store, tmp_path, 2, 6)}) == 1


def test_a_run_that_was_stopped_before_its_first_weights_were_there(tmp_path: Path) -> None:
    store = MemoryStore()

    def trace(at: str) -> None:
        if at == "before:manifest":
            raise Killed

    with pytest.raises(Killed):
        join(store, 0, 2, trace=trace, **SETTINGS).start(Toy.fresh(0).snapshot(), settings={}, resumed=False)
    assert keys.FLEET in store.list("") and reach(store) is None, "there is nothing to resume yet"
    with pytest.raises(FleetMismatch, match="no first weights yet.*start it as it was begun"):
        begin_epoch(store, 3)
    assert len({toy.digest for toy in resume(store, tmp_path, 2, 3)}) == 1, "and it can be begun"


# -- those who wake up late


def test_killed_between_roster_and_mean_and_resumed_beside_a_zombie(tmp_path: Path) -> None:
    """Two of three die when the roster is written. The third sleeps, wakes up after the resume, and stops."""
    store, asleep, wake = MemoryStore(), threading.Event(), threading.Event()
    ends: dict[int, Any] = {}

    def life(replica: int) -> None:
        toy = Toy.fresh(replica)

        def trace(at: str) -> None:
            if toy.round == 4 and at in ("after:roster", "before:reduce"):
                if replica != 2:
                    raise Killed
                assert collective._heart is not None
                collective._heart.stop("running")
                asleep.set()
                assert wake.wait(60)

        settings = {**SETTINGS, "takeover_seconds": 0.1}
        collective = join(store, replica, 3, trace=trace, **settings)
        try:
            run_toy(toy, collective, 100, save=tmp_path / f"{replica}.pt")
        except (Killed, Fenced) as error:
            ends[replica] = error

    threads = [threading.Thread(target=life, args=(replica,)) for replica in range(3)]
    for thread in threads:
        thread.start()
    assert asleep.wait(60)
    for thread in threads[:2]:
        thread.join(timeout=60)
    bury(store, 3)
    epoch = begin_epoch(store, 2)
    assert epoch.first in (4, 5), "the roster counts if all that it needs is there"
    results: list[list[Toy]] = []
    fleet = threading.Thread(target=lambda: results.append(resume(store, tmp_path, 2, 9)))
    fleet.start()
    wake.set()  # beside the new fleet, it goes on where it was
    fleet.join(timeout=60)
    threads[2].join(timeout=60)
    assert len({toy.digest for toy in results[0]}) == 1
    assert isinstance(ends[2], Fenced) and "is sealed" in str(ends[2]) and "not to be" in str(ends[2])
    assert set(json.loads(current(store).get("final.json"))["replicas"]) == {0, 1}


def test_a_waiting_replica_of_the_old_epoch_stops() -> None:
    store = MemoryStore()
    with Fleet(2, store) as old:
        old.round(0, {0: 1.0, 1: 1.0})
        results: list[Any] = []
        waiting = threading.Thread(
            target=lambda: results.append(
                attempt(lambda: old.all[0].average(contribution(0, 1, SCALAR, torch.ones(1))))
            )
        )
        waiting.start()
        while keys.ready(1, 0, 0) not in store.list("rounds/"):
            time.sleep(0.002)
        for collective in old.all:
            assert collective._heart is not None
            collective._heart.stop("running")
        bury(store, 2)
        assert begin_epoch(store, 1).first == 1
        waiting.join(timeout=30)
        assert isinstance(results[0], Fenced)


# -- who may


def test_a_run_that_is_being_trained_is_left_alone() -> None:
    with Fleet(2) as two:
        two.round(0, {0: 1.0, 1: 1.0})
        with pytest.raises(ReplicaTaken, match=r"is being trained: replica 0 by process .*Stop these processes"):
            begin_epoch(two.store, 3)
        assert scalar(two.round(1, {0: 3.0, 1: 5.0})[0]) == 4.0


def test_beating_hearts_elsewhere_are_respected() -> None:
    store = MemoryStore()
    with Fleet(2, store) as two:
        two.round(0, {0: 1.0, 1: 1.0})
    bury(store, 2)
    beats = iter(range(100, 200))

    def sleep(seconds: float) -> None:
        beat = {"incarnation": 1, "counter": next(beats), "heartbeat_seconds": 0.02, "host": "far-away"}
        store.put("members/1.json", json.dumps(beat).encode())
        time.sleep(seconds)

    with pytest.raises(ReplicaTaken, match="replica 1 on far-away"):
        begin_epoch(store, 3, sleep=sleep)
    assert read_epochs(store) == () and reach(store).open == (1, 0)  # type: ignore[union-attr]


def test_beginning_it_again_after_any_interruption(tmp_path: Path) -> None:
    class Dies(MemoryStore):
        dying = ""

        def put_if_absent(self, key: str, data: Any) -> None:
            if self.dying and self.dying in key:
                self.dying = ""
                raise Killed
            super().put_if_absent(key, data)

    store = Dies()
    killed(store, tmp_path, 2, 4)
    for step in ("roster.json", "epochs/"):
        store.dying = step
        with pytest.raises(Killed):
            begin_epoch(store, 3)
    with pytest.raises(FleetMismatch, match="sealed at round 4 .*resume it again"):
        join(store, 0, 2, **SETTINGS).start(Toy.fresh(0).snapshot(), settings={}, resumed=False)
    epoch = begin_epoch(store, 3)
    assert (epoch.number, epoch.first, epoch.sealed) == (1, 4, (4, 0))
    assert len({toy.digest for toy in resume(store, tmp_path, 3, 6)}) == 1


def test_two_that_begin_one_at_once(tmp_path: Path) -> None:
    store = MemoryStore()
    killed(store, tmp_path, 2, 4)
    results = run_threads([lambda n=n: attempt(lambda: begin_epoch(store, n)) for n in (3, 3, 4, 4)])
    epochs = read_epochs(store)
    assert len(epochs) >= 1
    for result in results:
        assert isinstance(result, (FleetMismatch, type(epochs[0]))), result


def test_a_roster_that_is_faster_than_the_seal(tmp_path: Path) -> None:
    """What is decided meanwhile belongs to the old epoch, and the seal goes one further."""

    class Racing(MemoryStore):
        racing = True

        def put_if_absent(self, key: str, data: Any) -> None:
            if self.racing and key == keys.roster(4, 0) and b'"sealed"' in data:
                self.racing = False
                roster = load(self.get(keys.roster(3, 0)), key)
                nobody: dict[str, Any] = {"members": [], "hashes": [], "owners": [], "shards": 0}
                super().put_if_absent(key, dump({**roster, **nobody, "round": 4, "kind": "abort"}))
            super().put_if_absent(key, data)

    store = Racing()
    killed(store, tmp_path, 2, 4)
    epoch = begin_epoch(store, 3)
    assert epoch.sealed == (4, 1) and epoch.first == 4


@pytest.mark.parametrize("replicas", [0, -1])
def test_no_fleet_is_that_small(replicas: int) -> None:
    with pytest.raises(ValueError, match=f"replicas must be at least 1, got {replicas}"):
        begin_epoch(MemoryStore(), replicas)


def test_there_must_be_a_run_that_is_not_over() -> None:
    store = MemoryStore()
    with pytest.raises(FleetMismatch, match="no run that could be resumed"):
        begin_epoch(store, 2)
    run_threads([lambda r=r: run_toy(Toy.fresh(r), join(store, r, 2, **SETTINGS), 3) for r in range(2)])
    with pytest.raises(FleetMismatch, match="has finished"):
        begin_epoch(store, 3)


def test_who_starts_as_before_is_refused(tmp_path: Path) -> None:
    store = MemoryStore()
    killed(store, tmp_path, 2, 4)
    begin_epoch(store, 3)
    with pytest.raises(FleetMismatch, match="epoch 1 .*replicas: 2 here, 3 in the fleet"):
        resume(store, tmp_path, 2, 6)
    with pytest.raises(FleetMismatch, match="nonce: 'mine' here"):
        join(store, 0, 3, nonce="mine", **SETTINGS).start(Toy.fresh(0).snapshot(), settings={}, resumed=False)
    with pytest.raises(FleetMismatch, match="settings.outer_lr: 0.5 here"):
        join(store, 0, 3, **SETTINGS).start(Toy.fresh(0).snapshot(), settings={"outer_lr": 0.5}, resumed=False)


def test_a_damaged_epoch_is_named() -> None:
    store = MemoryStore()
    with Fleet(1, store) as one:
        one.round(0, {0: 1.0})
    for bad in (b"", b"{}", b'{"wire":1,"run":"r","epoch":2,"first":0,"replicas":1,"sealed":[0,0]}'):
        store.put(keys.epoch(1), bad)
        with pytest.raises(ObjectCorrupt, match=r"epochs/1.json"):
            begin(join(store, 0, 1), SCALAR)


def test_the_view_of_an_epoch() -> None:
    store = MemoryStore()
    with Fleet(1, store) as one:
        for number in range(3):
            one.round(number, {0: 1.0})
            one.all[0].applied(lambda now=number + 1: snapshot(SCALAR, now))
        assert one.store.list("rounds/00000002/")
    begin_epoch(store, 1)
    view = current(store)
    assert isinstance(view, EpochStore)
    assert view.list("rounds/00000002/") == store.list("rounds/00000002/")
    assert view.list("claims/") == [] and view.list("checkpoints/") == store.list("checkpoints/")
    view.put(keys.ready(3, 0, 0), b"new")
    assert store.get("epochs/1/" + keys.ready(3, 0, 0)) == b"new"
    view.delete([keys.ready(3, 0, 0)])
    assert view.list("rounds/00000003/") == []
    assert digest(3)
