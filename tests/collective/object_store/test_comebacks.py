"""What a fleet leaves behind when it is killed and restarted, and what a damaged object may cost: never the run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_replication.collective.layout import Layout, Slot
from composer_replication.collective.object_store import keys
from composer_replication.errors import FleetMismatch, ObjectCorrupt, ReplicaTaken, RoundAborted, StoreError
from composer_replication.store import LocalStore, MemoryStore
from composer_replication.store.local import ABANDONED_SECONDS
from tests.collective.conformance import SCALAR, contribution, snapshot
from tests.collective.object_store.helpers import Clock, Fleet, attempt, join, scalar
from tests.collective.object_store.toy import Toy, run_toy
from tests.support.threads import run_threads

SETTINGS = {"outer_lr": 1.0}
OTHER = Layout((Slot("theta", (), "torch.float32"), Slot("head", (3,), "torch.float32")))


class Killed(BaseException):
    """Ends a replica where it is, as signal 9 would: nothing catches it."""


def die_at(round: Callable[[], int], last: int) -> Callable[[str], None]:
    def trace(step: str) -> None:
        if step == "before:collect" and round() > last:
            raise Killed

    return trace


def lives(store: MemoryStore, folder: Path, replicas: int, deaths: tuple[int, ...], rounds: int) -> list[Toy]:
    """A whole fleet that is killed before it tidies after each round in `deaths`, and restarted from its records."""
    settings = {"checkpoint_every": 2, "mode": "sharded"}

    def life(replica: int, last: int) -> Toy | None:
        record = folder / f"{replica}.pt"
        resumed = record.exists()
        toy = Toy.load(replica, record) if resumed else Toy.fresh(replica)
        trace = die_at(lambda: toy.round, last)
        collective = join(store, replica, replicas, trace=trace, **settings)
        collective.applied = _saving(collective.applied, toy, record)  # type: ignore[method-assign]
        try:
            return run_toy(toy, collective, rounds, resumed=resumed, save=record)
        except Killed:
            return None

    for last in deaths:
        assert run_threads([lambda r=r, n=last: life(r, n) for r in range(replicas)]) == [None] * replicas
    toys = run_threads([lambda r=r: life(r, rounds + 1) for r in range(replicas)])
    return [toy for toy in toys if toy is not None]


def _saving(applied: Callable[[Any], None], toy: Toy, record: Path) -> Callable[[Any], None]:
    def save_first(take: Any) -> None:
        toy.save(record)
        applied(take)

    return save_first


def test_restarts_leave_no_blobs_behind(tmp_path: Path) -> None:
    store = MemoryStore()
    store.put("another/rounds/00000001/0/in/0.1/0", b"a blob of another run")
    toys = lives(store, tmp_path, 3, deaths=(6, 10, 14), rounds=22)
    assert len(toys) == 3 and len({toy.digest for toy in toys}) == 1
    left = {keys.round_of(key) for key in store.list("rounds/") if "/in/" in key or "/out/" in key}
    assert min(round for round, _ in left) >= 16, sorted(left)  # type: ignore[misc, type-var]
    assert sum(key.endswith("roster.json") for key in store.list("rounds/")) == 22, "pointers stay"
    assert store.list("another/") == ["another/rounds/00000001/0/in/0.1/0"]


# -- unfinished files


def test_unfinished_files_of_killed_writers_are_removed_when_they_are_old(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = LocalStore(root)
    store.put("a/b", b"kept")
    old, fresh = root / ".tmp-0123", root / ".tmp-4567"
    for path in (old, fresh):
        path.write_bytes(b"a beginning")
    before = time.time() - 2 * ABANDONED_SECONDS
    os.utime(old, (before, before))
    again = LocalStore(root)
    assert sorted(os.listdir(root)) == [fresh.name, "a"], "a live writer's file is left alone"
    assert again.get("a/b") == b"kept"


# -- claims


@pytest.mark.parametrize("damaged", [b"", b"\x80\x04", b"[]", b"{}"])
def test_a_damaged_claim_does_not_block_its_id(damaged: bytes) -> None:
    store = MemoryStore()
    store.put(keys.claim(0, 1), damaged)
    store.put(keys.member(0), json.dumps({"incarnation": 1, "counter": 4, "heartbeat_seconds": 0.05}).encode())
    collective = join(store, 0, 1)
    collective.start(snapshot(SCALAR, 0), settings=SETTINGS, resumed=False)
    collective.close()
    assert keys.claim(0, 2) in store.list("claims/0/")


def test_a_damaged_claim_whose_holder_lives_is_respected() -> None:
    with Fleet(1) as fleet:
        fleet.store.put(keys.claim(0, 1), b"torn")
        with pytest.raises(ReplicaTaken, match=r"a live process whose claim claims/0/1 is damaged"):
            join(fleet.store, 0, 1).start(snapshot(SCALAR, 0), settings=SETTINGS, resumed=False)


# -- checkpoints


def trained(every: int, rounds: int, store: MemoryStore | None = None) -> MemoryStore:
    store = store if store is not None else MemoryStore()
    run_threads(
        [lambda r=r: run_toy(Toy.fresh(r), join(store, r, 2, checkpoint_every=every), rounds) for r in range(2)]
    )
    store.delete(["final.json", keys.manifest(rounds), *contents(store, rounds)])  # as if it weren't over
    return store


def contents(store: MemoryStore, round: int) -> list[str]:
    return [key for key in store.list(keys.checkpoint(round)) if key != keys.manifest(round)]


@pytest.mark.parametrize("damage", ["gone", "torn", "manifest"])
def test_a_joiner_takes_an_older_checkpoint_when_the_newest_is_damaged(damage: str) -> None:
    store = trained(every=2, rounds=6)
    digest = json.loads(store.get("results/0.json"))["digest"]
    (first, *_) = contents(store, 4)
    if damage == "gone":
        store.delete([first])
    else:
        key = first if damage == "torn" else keys.manifest(4)
        store.put(key, store.get(key)[:-1])
    late = run_toy(Toy.fresh(1), join(store, 1, 2, checkpoint_every=2), 6)
    assert late.digest == digest and late.applied[0][0] == 2


def test_no_older_checkpoint_whose_rounds_are_there() -> None:
    store = trained(every=4, rounds=10)
    store.delete(contents(store, 8))
    with pytest.raises(
        ObjectCorrupt, match=r"newest checkpoint \(round 8 .*Start this replica with a checkpoint of its"
    ):
        run_toy(Toy.fresh(1), join(store, 1, 2, checkpoint_every=4), 10)


class Passing(MemoryStore):
    """A run that goes on while its checkpoints are read: after the first chunk of one, its next one is there, and what
    lies between them is gone. As often as `moves` says."""

    def __init__(self) -> None:
        super().__init__()
        self.shown, self.moves, self.keeps = 0, 0, True

    def delete(self, keys: Any) -> None:
        if not self.keeps:
            super().delete(keys)

    def list(self, prefix: str) -> list[str]:
        found = super().list(prefix)
        return [key for key in found if self.keeps or (keys.manifest_round(key) or 0) <= self.shown]

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        data = super().get(key, max_bytes=max_bytes)
        if self.moves and key.startswith(keys.checkpoint(self.shown)) and key != keys.manifest(self.shown):
            self.moves -= 1
            for round in (self.shown, self.shown + 1):
                self.delete([key for key in self.list(keys.round_prefix(round)) if keys.is_blob(key)])
            self.shown += 2
        return data


@pytest.mark.parametrize("moves", [1, 2, 3])
def test_a_joiner_that_reads_longer_than_a_checkpoint_period(moves: int) -> None:
    store = Passing()
    trained(2, 10, store)
    digest = json.loads(store.get("results/0.json"))["digest"]
    store.keeps, store.shown, store.moves = False, 2, moves
    collective = join(store, 1, 2, checkpoint_every=2)
    if moves == 3:
        with pytest.raises(StoreError, match=r"\(rounds 2, 4, 6\).*checkpoint_every is too short for this link"):
            run_toy(Toy.fresh(1), collective, 10)
        return
    late = run_toy(Toy.fresh(1), collective, 10)
    assert late.digest == digest and late.applied[0][0] == 2 + 2 * moves


# -- other tensors


@pytest.mark.parametrize("policy", ["strict", "skip"])
def test_other_tensors_are_named_with_the_remedy(policy: Any) -> None:
    with Fleet(3, failure_policy=policy) as fleet:
        results = run_threads(
            [
                lambda: attempt(lambda: fleet.all[0].average(contribution(0, 0, SCALAR, torch.full((1,), 3.0)))),
                lambda: attempt(lambda: fleet.all[1].average(contribution(1, 0, SCALAR, torch.full((1,), 5.0)))),
                lambda: attempt(lambda: fleet.all[2].average(contribution(2, 0, OTHER, torch.ones(4)))),
            ]
        )
        wrong = str(results[2])
        assert isinstance(results[2], FleetMismatch) and "head: only here" in wrong
        assert "Freeze and unfreeze" in wrong and "without its own checkpoint" not in wrong
        for result in results[:2]:
            if policy == "skip":
                assert scalar(result) == 4.0 and result.absent == {2: "it trained other tensors"}
            else:
                assert isinstance(result, RoundAborted)
                assert "replica 2: it trained other tensors" in str(result) and "Freeze and unfreeze" in str(result)


# -- slow restarts


def test_a_resumed_replica_gives_the_others_time_to_start() -> None:
    clock = Clock()
    quick: dict[str, Any] = {"timeout_seconds": 0.05, "start_timeout_seconds": 20.0, **clock.settings}
    with Fleet(2, **quick) as fleet:
        fleet.round(0, {0: 3.0, 1: 5.0})
        for collective in fleet.all:
            collective.close()
        back = [join(fleet.store, replica, 2, **quick) for replica in range(2)]

        def life(replica: int) -> Any:
            if replica == 1:  # comes when the first one has looked for it long past its timeout
                while keys.ready(1, 0, 0) not in fleet.store.list("rounds/00000001/"):
                    time.sleep(0.002)
                clock.move(5.0)
            back[replica].start(snapshot(SCALAR, 1), settings=SETTINGS, resumed=True)
            return attempt(
                lambda: back[replica].average(contribution(replica, 1, SCALAR, torch.full((1,), 2.0 + replica)))
            )

        outcomes = run_threads([lambda r=r: life(r) for r in range(2)])
        assert [scalar(outcome) for outcome in outcomes] == [2.5, 2.5]
        # That is for the first round only: then nobody is starting any more.
        assert isinstance(attempt(lambda: back[0].average(contribution(0, 2, SCALAR, torch.ones(1)))), RoundAborted)
        for collective in back:
            collective.close()


# -- reports that nobody could read


@pytest.mark.parametrize(
    "changes", [{"steps": -1}, {"weight": float("nan")}, {"metrics": {"x" * 5000: 1.0}}, {"tokens": 1.5}]
)
def test_a_report_that_nobody_could_read_is_an_error_here_only(changes: dict[str, Any]) -> None:
    with Fleet(3, failure_policy="skip", timeout_seconds=0.3) as fleet:
        fleet.round(0, {0: 1.0, 1: 1.0, 2: 1.0})
        bad = contribution(2, 1, SCALAR, torch.ones(1))
        bad = replace(bad, report=replace(bad.report, **changes))
        results = run_threads(
            [
                lambda: attempt(lambda: fleet.all[0].average(contribution(0, 1, SCALAR, torch.full((1,), 3.0)))),
                lambda: attempt(lambda: fleet.all[1].average(contribution(1, 1, SCALAR, torch.full((1,), 5.0)))),
                lambda: attempt(lambda: fleet.all[2].average(bad)),
            ]
        )
        assert isinstance(results[2], ValueError) and "can't declare its report of round 1" in str(results[2])
        assert [scalar(result) for result in results[:2]] == [4.0, 4.0]
        assert keys.ready(1, 0, 2) not in fleet.store.list("rounds/")
