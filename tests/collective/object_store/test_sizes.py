"""Nothing is read before its size is known to be bounded, and nothing that is read is run: a walk over all readers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from composer_replication.cli.view import RunReader
from composer_replication.collective.layout import Layout
from composer_replication.collective.object_store import checkpoints, keys
from composer_replication.collective.object_store.ending import close_run
from composer_replication.collective.object_store.history import closed_roster
from composer_replication.collective.object_store.tidy import plan_tidy
from composer_replication.collective.object_store.wire import dump, load
from composer_replication.diloco.export import read_shared_weights
from composer_replication.errors import ObjectCorrupt, ReplicationError
from composer_replication.store import MemoryStore
from tests.collective.conformance import MIXED, begin, digest, snapshot
from tests.collective.object_store.helpers import Fleet, join

HUGE = 1 << 40
LARGEST = 64 * 1024 * 1024  # of what any reader here says it would take


class Bounded(MemoryStore):
    """A copy of a store in which the object `huge` has a terabyte. Who reads without a bound, or with one that is no
    bound, is noted."""

    def __init__(self, copied: MemoryStore, huge: str = "") -> None:
        super().__init__("bounded")
        self._objects = dict(copied._objects)
        self.huge = huge
        self.asked: set[str] = set()
        self.unbounded: list[str] = []

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        self.asked.add(key)
        if max_bytes is None or max_bytes > LARGEST:
            self.unbounded.append(f"{key} with max_bytes={max_bytes}")
        if key == self.huge and key in self._objects:
            raise ObjectCorrupt(f"{key} has {HUGE} bytes, at most {max_bytes} expected ({self.uri})")
        return super().get(key, max_bytes=max_bytes)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        raise AssertionError("parts of objects aren't read: a hash is that of the whole")


def _run(mode: str) -> MemoryStore:
    """Two rounds of a fleet of three that is still under way, with a checkpoint after each."""
    store = MemoryStore()
    with Fleet(3, store, layout=MIXED, mode=mode, checkpoint_every=1) as fleet:
        for number in range(2):
            outcomes = fleet.round(number, {0: 1.0, 1: 2.0, 2: 3.0})
            assert all(not isinstance(outcome, Exception) for outcome in outcomes.values()), outcomes
            for collective in fleet.all:
                collective.applied(partial(snapshot, MIXED, number + 1))
        fleet.all[0].finish("state-2", {})
    return store


@pytest.fixture(scope="module")
def runs() -> dict[str, MemoryStore]:
    return {mode: _run(mode) for mode in ("direct", "sharded")}


def newcomer(view: MemoryStore) -> None:
    """A replica that comes back without a checkpoint of its own, and follows the rounds that are behind the fleet."""
    back = join(view, 2, 3, checkpoint_every=1, start_timeout_seconds=0.2)
    try:
        got = begin(back, MIXED)
        for number in range(got.round, 3):
            if back.follow(number, MIXED, digest(number), wait=False) is None:
                break
            back.applied(partial(snapshot, MIXED, number + 1))
    finally:
        back.close()


def resumed(view: MemoryStore) -> None:
    """A replica that comes back with a state of its own, of round 0, and follows from there."""
    back = join(view, 1, 3, checkpoint_every=1, start_timeout_seconds=0.2)
    try:
        back.start(snapshot(MIXED, 0), settings={"outer_lr": 1.0}, resumed=True)
        for number in range(2):
            outcome = back.follow(number, MIXED, digest(number), wait=False)
            assert outcome is not None
            back.applied(partial(snapshot, MIXED, number + 1))
    finally:
        back.close()


def every_checkpoint(view: MemoryStore) -> None:
    run = str(json.loads(MemoryStore.get(view, keys.FLEET, max_bytes=LARGEST)).get("nonce"))
    for number in checkpoints.rounds(view):
        checkpoints.read(view, run, number)


def ending(view: MemoryStore) -> None:
    """Whoever looks whether all have ended alike."""
    run = str(json.loads(MemoryStore.get(view, keys.FLEET, max_bytes=LARGEST)).get("nonce"))
    first = closed_roster(view, run, 0)
    assert first is not None
    close_run(view, first.roster, "a digest that nobody has", lambda step: None)


def commands(view: MemoryStore) -> None:
    reader = RunReader(view)
    reader.refresh()
    reader.view("")
    plan_tidy(view, before=None, only_final=False)


READERS: dict[str, Callable[[Any], Any]] = {
    "newcomer": newcomer,
    "resumed": resumed,
    "checkpoints": every_checkpoint,
    "ending": ending,
    "export": read_shared_weights,
    "commands": commands,
}


@pytest.mark.parametrize("mode", ["direct", "sharded"])
def test_every_reader_bounds_what_it_reads(mode: str, runs: dict[str, MemoryStore]) -> None:
    """Each kind of object is read by somebody, and by nobody without a bound."""
    asked: set[str] = set()
    for name, read in READERS.items():
        view = Bounded(runs[mode])
        try:
            read(view)
        except ReplicationError as error:
            assert name == "export" and "digest" in str(error), (name, error)  # the tests' states have made-up ones
        assert view.unbounded == [], name
        asked |= view.asked
    kinds = ["fleet.json", "claims/", "members/", "checkpoints/00000001/manifest.json", "checkpoints/00000001/"]
    kinds += ["roster.json", "/ready/", "/mean/", "results/"] + (["/out/"] if mode == "sharded" else ["/in/"])
    for kind in kinds:
        assert any(kind in key for key in asked), kind


@pytest.mark.parametrize("mode", ["direct", "sharded"])
def test_an_oversized_object_of_every_kind(mode: str, runs: dict[str, MemoryStore]) -> None:
    """Whichever object of a run has a terabyte: a reader does without it, or says so, and never takes it in."""
    kinds = {re.sub(r"[0-9a-f]{32}|[0-9]+", "#", key): key for key in runs[mode].list("")}
    if mode == "direct":  # the others are as in a sharded run
        kinds = {kind: key for kind, key in kinds.items() if "/in/" in kind or "/mean/" in kind}
    for key in kinds.values():
        for name, read in READERS.items():
            view = Bounded(runs[mode], key)
            try:
                read(view)
            except ReplicationError:
                pass
            assert view.unbounded == [], (key, name)


def test_a_pointer_that_names_a_terabyte(runs: dict[str, MemoryStore]) -> None:
    """A size that no chunk has isn't passed on to the store as a bound: a manifest's, a mean's."""
    store = runs["sharded"]
    manifest = load(store.get(keys.manifest(1)), keys.manifest(1))
    manifest["anchor"][0][1] = HUGE
    view = Bounded(store)
    view.put(keys.manifest(1), dump(manifest))
    with pytest.raises(ObjectCorrupt, match=f"says {HUGE} bytes, which its layout doesn't come to"):
        checkpoints.read(view, str(manifest["run"]), 1)
    assert view.unbounded == []
    verdict = load(store.get(keys.mean(1, 0, 0)), keys.mean(1, 0, 0))
    verdict["chunks"][0][1] = HUGE
    view = Bounded(store)
    view.put(keys.mean(1, 0, 0), dump(verdict))
    with pytest.raises(ReplicationError):
        resumed(view)
    assert view.unbounded == []


@pytest.mark.parametrize("shape", [[1 << 50], [-5], [2.5], ["many"], [True], [1 << 40, 1 << 40]])
def test_a_layout_that_no_model_has(shape: list[Any]) -> None:
    with pytest.raises(ValueError, match="shape|more than any model has"):
        Layout.from_json({"chunk_elements": 4096, "slots": [["w", shape, "torch.float32", "parameter"]]})
