"""Checkpoints of the shared state: written beside the training, holding nobody up, and of the very state they name."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch

from composer_replication.collective.object_store import checkpoints, keys
from composer_replication.collective.object_store.garbage import Collector
from composer_replication.collective.object_store.pointers import Roster
from composer_replication.errors import StoreRefused
from composer_replication.store import MemoryStore
from tests.collective.conformance import SCALAR, contribution, digest, snapshot
from tests.collective.object_store.helpers import Fleet, join, scalar
from tests.collective.object_store.toy import Toy, run_toy
from tests.support.threads import run_threads


class Gate(MemoryStore):
    """Contents of checkpoints after the first pass only when the gate is open; `refused`: not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.asked, self.refused = threading.Event(), threading.Event(), False

    def put(self, key: str, data: Any) -> None:
        if key.startswith("checkpoints/") and not key.startswith(keys.checkpoint(0)):
            self.asked.set()
            assert self.open.wait(30)
            if self.refused:
                raise StoreRefused(f"{key}: not allowed")
        super().put(key, data)


def average(fleet: Fleet, replica: int, number: int, value: float) -> float:
    return scalar(fleet.all[replica].average(contribution(replica, number, SCALAR, torch.full((1,), value))))


def test_nobody_waits_for_the_one_who_writes_a_checkpoint() -> None:
    store = Gate()
    with Fleet(2, store, checkpoint_every=1) as two:
        two.round(0, {0: 1.0, 1: 1.0})
        anchor = torch.tensor([1.0])
        two.all[0].applied(lambda: snapshot(SCALAR, 1, anchor))  # returns, though nothing can be written
        two.all[1].applied(lambda: snapshot(SCALAR, 1, anchor.clone()))
        assert store.asked.wait(30) and not store.list(keys.checkpoint(1))
        results: dict[int, float] = {}

        other_is_through = threading.Event()

        def write() -> None:
            results[0] = average(two, 0, 1, 3.0)
            anchor.fill_(100.0)  # what the outer step does to the tensors

        def train() -> None:
            results[1] = average(two, 1, 1, 5.0)
            other_is_through.set()

        writer, other = threading.Thread(target=write), threading.Thread(target=train)
        writer.start()
        other.start()
        assert other_is_through.wait(30), "the round closes for the other one"
        assert 0 not in results, "the writer doesn't change its tensors yet"
        store.open.set()
        writer.join(timeout=30)
        other.join(timeout=30)
        assert results == {0: 4.0, 1: 4.0}
        got = checkpoints.read(store, two.all[0]._run, 1)
        assert got.anchor[0].item() == 1.0 and got.digest == digest(1)


def test_a_checkpoint_that_cannot_be_written_is_missed(caplog: pytest.LogCaptureFixture) -> None:
    store = Gate()
    store.open.set()
    store.refused = True
    with Fleet(2, store, checkpoint_every=1) as two, caplog.at_level(logging.WARNING, "composer_replication"):
        for number in range(3):
            store.refused = number == 0
            two.round(number, {0: 1.0, 1: 1.0})
            for collective in two.all:
                collective.applied(lambda now=number + 1: snapshot(SCALAR, now))
            checkpointer = two.all[0]._checkpointer
            assert checkpointer is not None
            checkpointer.settle()
        assert "could not write the checkpoint of round 1" in caplog.text and "not allowed" in caplog.text
        assert [keys.manifest(n) in store.list("checkpoints/") for n in (1, 2)] == [False, True]


def test_a_checkpoint_that_cannot_be_confirmed_is_missed(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(MemoryStore):
        def put_if_absent(self, key: str, data: Any) -> None:
            if key == keys.manifest(1):
                raise StoreRefused(f"{key}: not allowed")
            super().put_if_absent(key, data)

    store = Refusing()
    with Fleet(2, store, checkpoint_every=1) as two, caplog.at_level(logging.WARNING, "composer_replication"):
        two.round(0, {0: 1.0, 1: 1.0})
        for collective in two.all:
            collective.applied(lambda: snapshot(SCALAR, 1))
        outcomes = two.round(1, {0: 3.0, 1: 5.0})
        assert [scalar(outcome) for outcome in outcomes.values()] == [4.0, 4.0]
        assert "could not write the checkpoint of round 1" in caplog.text and "not allowed" in caplog.text


def test_closing_does_not_wait_for_a_whole_checkpoint() -> None:
    store = Gate()
    with Fleet(1, store, checkpoint_every=1) as one:
        one.round(0, {0: 1.0})
        one.all[0].applied(lambda: snapshot(SCALAR, 1, torch.ones(1)))
        assert store.asked.wait(30)
        closing = threading.Thread(target=one.all[0].close)
        closing.start()
        store.open.set()
        closing.join(timeout=30)
        assert not closing.is_alive()
        assert keys.manifest(1) not in store.list("checkpoints/")


def test_old_contents_go_though_the_lowest_id_has_gone() -> None:
    store = MemoryStore()
    for number in range(5):
        store.put(keys.checkpoint_blob(number, "0" * 32), b"contents")
        store.put(keys.manifest(number), b"{}")
    collector = Collector(store, 1, checkpoint=0, every=1)
    for number in range(4):
        reports = tuple(contribution(replica, number, SCALAR, torch.ones(1)).report for replica in (0, 1))
        here = reports if number == 0 else reports[1:]  # replica 0 took part once, and then no more
        roster = Roster(run="r", round=number, attempt=0, writer=(1, 1), kind="roster", others=here, expected_next=(1,))
        collector.closed(roster)
        collector.collect(roster)
    contents = [key.split("/")[1] for key in store.list("checkpoints/") if not key.endswith(".json")]
    assert contents == ["00000003", "00000004"], "two generations are kept"
    assert len(store.list("checkpoints/")) == 5 + 2


class Untidy(MemoryStore):
    """Deletes or lists nothing (heartbeats and starting need no listing of rounds), as long as it is refused."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def delete(self, keys: Any) -> None:
        if self.what == "delete":
            raise StoreRefused("not allowed to delete")
        super().delete(keys)

    def list(self, prefix: str) -> list[str]:
        if self.what == "list" and prefix.startswith("rounds/"):
            raise StoreRefused("not allowed to list")
        return super().list(prefix)


@pytest.mark.parametrize("what", ["delete", "list"])
def test_a_store_that_cannot_be_tidied_ends_no_run(what: str, caplog: pytest.LogCaptureFixture) -> None:
    store = Untidy(what)
    with Fleet(2, store, checkpoint_every=1, mode="direct") as fleet, caplog.at_level(logging.WARNING):
        for number in range(7):
            fleet.round(number, {0: 1.0, 1: 1.0})
            run_threads([lambda c=c, n=number: c.applied(lambda: snapshot(SCALAR, n + 1)) for c in fleet.all])
            if number == 5:
                lines = [record.message for record in caplog.records if "can't delete" in record.message]
                assert sorted(line[:9] for line in lines) == ["replica 0"] + ["replica 1"] * (what == "delete")
                assert any("/in/" in key and "/00000000/" in key for key in MemoryStore.list(store, "rounds/"))
                store.what = ""
        left = {keys.round_of(key) for key in store.list("rounds/") if "/in/" in key}
    assert min(round for round, _ in left) >= 3, sorted(left)  # type: ignore[misc, type-var]


def test_a_period_longer_than_what_is_kept() -> None:
    """Blobs back to the newest checkpoint stay, however many rounds that is, and a newcomer follows them all."""
    store = MemoryStore()
    settings: dict[str, Any] = {"checkpoint_every": 9, "mode": "sharded"}
    toys = run_threads([lambda r=r: run_toy(Toy.fresh(r), join(store, r, 2, **settings), 17) for r in range(2)])
    store.delete(["final.json", keys.manifest(17)])  # as if it weren't over
    late = run_toy(Toy.fresh(1), join(store, 1, 2, **settings), 17)
    assert late.digest == toys[0].digest == toys[1].digest
    assert [round for round, _ in late.applied] == list(range(9, 17))
    kept = {keys.round_of(key) for key in store.list("rounds/") if "/out/" in key}
    assert min(round for round, _ in kept) == 7, "two rounds before the checkpoint"  # type: ignore[misc, type-var]
