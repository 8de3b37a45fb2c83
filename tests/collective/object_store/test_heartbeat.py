"""What a replica shows of itself: whatever a trainer tells, the heartbeat goes on and can be read."""

from __future__ import annotations

import json
import math
import threading
from typing import Any

import pytest
import torch

from composer_replication.collective.object_store import keys
from composer_replication.collective.object_store.fleet import heartbeat
from composer_replication.collective.object_store.heartbeat import Heartbeat
from composer_replication.store import MemoryStore
from tests.collective.conformance import SCALAR, digest, snapshot
from tests.collective.object_store.helpers import Fleet


def beating(store: MemoryStore) -> Heartbeat:
    return Heartbeat(store, 0, 1, 0.002, "here")


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_leaves_the_rest_readable(loss: float) -> None:
    store = MemoryStore()
    heart = beating(store)
    heart.show({"loss": loss, "round": 3})
    heart._beat("running")
    beat = heartbeat(store, 0)
    assert (beat["counter"], beat["status"]) == (1, {"loss": None, "round": 3})


def test_a_run_ends_though_its_loss_is_no_number() -> None:
    store = MemoryStore()
    with Fleet(2, store) as two:
        two.round(0, {0: 1.0, 1: 1.0}, leaving=True)
        for collective in two.all:
            collective.applied(lambda: snapshot(SCALAR, 1, torch.ones(1)))
        for collective in two.all:
            collective.finish(digest(1), {"metrics": {"loss": math.nan}})
    assert store.list(keys.FINAL) == [keys.FINAL] and keys.manifest(1) in store.list("checkpoints/")
    assert json.loads(store.get(keys.result(0)))["result"] == {"metrics": {"loss": None}}


def test_what_cannot_be_shown_costs_one_beat_and_not_the_thread() -> None:
    class Odd:
        asked = threading.Event()

        def __str__(self) -> str:
            self.asked.set()
            raise RuntimeError("a device error")

    store = MemoryStore()
    heart = beating(store)
    heart.show({"what": Odd()})
    heart.start()
    assert Odd.asked.wait(20)
    heart.show({"what": "fine"})
    heart.stop("closed")
    beat = heartbeat(store, 0)
    assert beat["status"] == {"what": "fine"} and "a device error" in beat["last_error"]
    assert not heart._thread.is_alive()


def test_a_look_at_a_round_that_is_over_says_nothing_of_the_next() -> None:
    class Slow(MemoryStore):
        """Gives the first roster that is asked for only when it is told to."""

        def __init__(self) -> None:
            super().__init__()
            self.asked, self.go = threading.Event(), threading.Event()

        def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
            data = super().get(key, max_bytes=max_bytes)
            if key == keys.roster(0, 0) and threading.current_thread() is not threading.main_thread():
                self.asked.set()
                assert self.go.wait(20)
            return data

    store: Any = Slow()
    with Fleet(2, store, failure_policy="skip", heartbeat_seconds=3600.0) as two:
        for number in range(2):
            store.go.set()
            two.round(number, {0: 1.0, 1: 1.0})
        run = two.all[0]._run
    store.asked.clear()
    store.go.clear()
    heart = Heartbeat(store, 7, 1, 3600.0, "here")  # of a replica that neither round had in it
    heart.watch(run, 0, 0)
    looking = threading.Thread(target=heart.look)
    looking.start()
    assert store.asked.wait(20)
    heart.watch(run, 1, 0)
    heart.look()
    assert heart.overtaken
    store.go.set()
    looking.join(20)
    assert heart.overtaken, "round 1 was decided without it"


def test_a_beat_that_was_stuck_at_the_end_does_not_call_the_dead_alive() -> None:
    class Stuck(MemoryStore):
        asked, go = threading.Event(), threading.Event()

        def put(self, key: str, data: Any) -> None:
            if threading.current_thread().name.startswith("heartbeat") and not self.go.is_set():
                self.asked.set()
                assert self.go.wait(20)
            super().put(key, data)

    store = Stuck()
    heart = Heartbeat(store, 0, 1, 0.002, "here", patience_seconds=0.01)
    heart.start()
    assert store.asked.wait(20)
    heart.stop("closed")
    store.go.set()
    heart._thread.join(20)
    assert heartbeat(store, 0)["state"] == "closed"
