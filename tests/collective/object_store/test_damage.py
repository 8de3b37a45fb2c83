"""Objects that are torn, flipped, foreign or hostile; stores that fail now and then; clocks that are wrong."""

from __future__ import annotations

import json
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_replication.collective.base import Report
from composer_replication.collective.object_store import checkpoints, keys
from composer_replication.collective.object_store.pointers import (
    ChunkFact,
    Ready,
    Roster,
    Verdict,
    dump_ready,
    dump_roster,
    dump_verdict,
    parse_ready,
    parse_roster,
    parse_verdict,
)
from composer_replication.collective.object_store.wire import dump, load
from composer_replication.errors import (
    Fenced,
    ObjectCorrupt,
    ObjectExists,
    RoundAborted,
    StoreError,
)
from composer_replication.store import Buffer, MemoryStore
from tests.collective.conformance import MIXED, SCALAR, begin, contribution, snapshot
from tests.collective.object_store.helpers import Fleet, attempt, join, scalar
from tests.support.threads import run_threads


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("/tmp/composer-replication-was-here", "w"))


def _flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def _oversized_header(data: bytes) -> bytes:
    return data[:12] + (2**32 - 1).to_bytes(4, "little") + data[16:]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit": _flipped,
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"\0",
    "a pickle": lambda data: pickle.dumps(_Evil()),
    "an oversized header": _oversized_header,
}


class Meddler(MemoryStore):
    """Changes what is written under keys that `when` picks."""

    def __init__(self, when: Callable[[str], bool], how: Callable[[bytes], bytes]) -> None:
        super().__init__("meddled")
        self.when, self.how = when, how
        self.active = True

    def put(self, key: str, data: Buffer) -> None:
        super().put(key, self.how(bytes(data)) if self.active and self.when(key) else data)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        super().put_if_absent(key, self.how(bytes(data)) if self.active and self.when(key) else data)


def input_of(replica: int) -> Callable[[str], bool]:
    return lambda key: f"/in/{replica}." in key


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("mode", ["direct", "sharded"])
def test_skip_goes_on_without_the_damaged_contribution(damage: str, mode: str) -> None:
    store = Meddler(input_of(1), DAMAGES[damage])
    with Fleet(3, store, failure_policy="skip", mode=mode) as fleet:
        for outcome in fleet.round(0, {0: 3.0, 1: 100.0, 2: 5.0}).values():
            assert [report.replica for report in outcome.members] == [0, 2] and scalar(outcome) == 4.0
            assert "rounds/00000000/0/in/1.1/0" in outcome.absent[1]
            assert outcome.expected_next == (0, 1, 2)
        store.active = False
        assert {scalar(outcome) for outcome in fleet.round(1, {0: 3.0, 1: 4.0, 2: 5.0}).values()} == {4.0}
    assert not Path("/tmp/composer-replication-was-here").exists()


@pytest.mark.parametrize("damage", DAMAGES)
def test_strict_ends_alike_and_names_the_object(damage: str) -> None:
    store = Meddler(input_of(1), DAMAGES[damage])
    with Fleet(3, store, mode="sharded") as fleet:
        errors = fleet.round(0, {0: 3.0, 1: 100.0, 2: 5.0})
        assert all(isinstance(error, RoundAborted) for error in errors.values())
        assert all("replica 1" in str(e) and "rounds/00000000/0/in/1.1/0" in str(e) for e in errors.values())


def test_a_blob_of_another_replica_or_round_is_refused() -> None:
    """Right hash, right size, well-formed, but not this replica's: its header says whose it is."""
    store = MemoryStore()
    taken: dict[str, bytes] = {}

    def meddle(step: str) -> None:
        if step == "after:upload":
            key = next(key for key in store.list("rounds/") if "/in/1." in key)
            taken[key] = store.get(key)

    with Fleet(2, store, trace=lambda step: None) as fleet:
        fleet.all[1]._trace = meddle
        fleet.round(0, {0: 3.0, 1: 5.0})
    (payload,) = taken.values()
    from composer_replication.collective.codec import check_chunk

    with pytest.raises(ObjectCorrupt, match="replica"):
        check_chunk("float32", (1,), payload, {"replica": 0})
    with pytest.raises(ObjectCorrupt, match="round"):
        check_chunk("float32", (1,), payload, {"replica": 1, "round": 7})


def test_a_damaged_mean_is_made_again_from_the_contributions() -> None:
    store = Meddler(lambda key: "/out/" in key, _flipped)
    values = [torch.randn(MIXED.elements) for _ in range(3)]
    results = []
    for target in (MemoryStore(), store):
        with Fleet(3, target, MIXED, mode="sharded", codec="int8") as fleet:
            outcomes = run_threads(
                [lambda c=c: c.average(contribution(c.replica, 0, MIXED, values[c.replica])) for c in fleet.all]
            )
            out = torch.empty(MIXED.chunks[0].elements)
            outcomes[2].mean(0, out)
            results.append(out)
    assert torch.equal(*results)


def test_a_mean_that_is_gone_for_good_means_being_behind() -> None:
    store = MemoryStore()
    with Fleet(2, store, mode="sharded") as fleet:
        fleet.round(0, {0: 3.0, 1: 5.0})
        store.delete([key for key in store.list("rounds/") if "/out/" in key or "/in/" in key])
        back = join(store, 1, 2, mode="sharded")
        fleet.all[1].close()
        back.start(snapshot(SCALAR, 0), settings={"outer_lr": 1.0}, resumed=True)
        error = attempt(lambda: back.average(contribution(1, 0, SCALAR, torch.ones(1))))
        assert type(error).__name__ == "Diverged" and "is behind" in str(error)
        back.close()


REPORT = Report(
    replica=1, steps=3, tokens=None, mass=0.1, square_norm=float("nan"), finite=False, leaving=False, next_lr=1e-3,
    preview=(0.1, 2.0), remaining=7, base="b", layout="l", metrics={"loss": 1 / 3}, longest_wait_seconds=0.7,
)  # fmt: skip
READY = Ready(run="r", round=2, attempt=1, replica=1, incarnation=3, report=REPORT, chunks=(ChunkFact("ab" * 8, 9),))


def test_pointers_come_back_as_they_went() -> None:
    assert parse_ready(dump_ready(READY), "k", run="r", round=2, attempt=1, replica=1) != READY  # NaN is not NaN
    sane = Report(**{**{f: getattr(REPORT, f) for f in REPORT.__dataclass_fields__}, "square_norm": 0.1})
    ready = Ready(run="r", round=2, attempt=1, replica=1, incarnation=3, report=sane, chunks=READY.chunks)
    assert parse_ready(dump_ready(ready), "k", run="r", round=2, attempt=1, replica=1) == ready
    roster = Roster(
        run="r", round=2, attempt=0, writer=(1, 3), kind="roster", prev="p", base="b", layout="l", mode="sharded",
        shards=1, owners=(1,), members=(sane,), hashes=("cd" * 8,), absent={0: "why"}, misses={0: 1},
        expected_next=(1,),
    )  # fmt: skip
    assert parse_roster(dump_roster(roster), "k", run="r", round=2, attempt=0) == roster
    verdict = Verdict(run="r", round=2, attempt=0, shard=0, writer=(1, 3), roster="h", chunks=READY.chunks)
    assert parse_verdict(dump_verdict(verdict), "k", run="r", round=2, attempt=0, shard=0, roster="h") == verdict


def test_a_report_that_does_not_tell_how_long_it_waited() -> None:
    """As those of replicas that know of no such field."""
    told = load(dump_ready(READY), "k")
    del told["report"]["longest_wait_seconds"]
    report = parse_ready(dump(told), "k", run="r", round=2, attempt=1, replica=1).report
    assert report is not None and report.longest_wait_seconds is None and report.metrics == REPORT.metrics


def changed(**fields: Any) -> bytes:
    return dump({**load(dump_ready(READY), "k"), **fields})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04",
        pickle.dumps({"wire": 1}),
        b"[1]",
        b"[" * 100_000,
        b'{"wire": NaN}',
        b'{"wire": 2}',
        changed(incarnation="../../x"),
        changed(blob_incarnation=-1),
        changed(blob_attempt=True),
        changed(round=2**70),
        changed(replica=0),
        changed(attempt=9),
        changed(run="another"),
        changed(report=None),
        changed(chunks=[["../../etc/passwd", 9, "0x0p+0", True]]),
        changed(chunks=[["ab" * 8, 9]]),
        changed(chunks="many"),
        changed(report={**load(dump_ready(READY), "k")["report"], "mass": "0.1x"}),
        changed(report={**load(dump_ready(READY), "k")["report"], "weight": "nan"}),
        changed(report={**load(dump_ready(READY), "k")["report"], "longest_wait_seconds": "inf"}),
        changed(report={**load(dump_ready(READY), "k")["report"], "longest_wait_seconds": "-0x1p+0"}),
        changed(report={**load(dump_ready(READY), "k")["report"], "replica": 0}),
    ],
)
def test_damaged_readies_are_refused_by_name(data: bytes) -> None:
    with pytest.raises(ObjectCorrupt, match="the/key"):
        parse_ready(data, "the/key", run="r", round=2, attempt=1, replica=1)


@pytest.mark.parametrize("policy", ["strict", "skip"])
def test_a_damaged_ready_in_the_store(policy: Any) -> None:
    bad = lambda data: data.replace(b'"incarnation":1', b'"incarnation":"../../../etc"')  # noqa: E731
    store = Meddler(lambda key: key.endswith("ready/1.json"), bad)
    with Fleet(3, store, failure_policy=policy, timeout_seconds=1.0) as fleet:
        store.active = False
        fleet.round(0, {0: 1.0, 1: 1.0, 2: 1.0})
        store.active = True
        outcomes = fleet.round(1, {0: 3.0, 1: 100.0, 2: 5.0})
        assert isinstance(outcomes[1], ObjectCorrupt) and "ready/1.json" in str(outcomes[1])
        if policy == "skip":
            assert scalar(outcomes[0]) == scalar(outcomes[2]) == 4.0 and "ready/1.json" in outcomes[0].absent[1]
        else:
            assert all(isinstance(outcomes[i], RoundAborted) and "ready/1.json" in str(outcomes[i]) for i in (0, 2))


@pytest.mark.parametrize("name", ["roster.json", "mean/0.json"])
def test_a_damaged_decision_stops_everyone_by_name(name: str) -> None:
    store = Meddler(lambda key: key.endswith(name), lambda data: data[:-1])
    with Fleet(2, store) as fleet:
        errors = fleet.round(0, {0: 1.0, 1: 1.0})
        assert all(isinstance(error, ObjectCorrupt) and name in str(error) for error in errors.values())


@pytest.mark.parametrize("damage", ["a flipped bit", "truncated", "a pickle"])
def test_a_damaged_checkpoint_is_refused_by_name(damage: str) -> None:
    is_blob = lambda key: key.startswith("checkpoints/") and "manifest" not in key  # noqa: E731
    store = Meddler(is_blob, DAMAGES[damage])
    zero = join(store, 0, 2)
    begin(zero, SCALAR)  # what it has just written itself isn't read back
    with pytest.raises(ObjectCorrupt, match="checkpoints/00000000/.*begin another one under another prefix"):
        begin(join(store, 1, 2), SCALAR)
    zero.close()


def test_a_damaged_manifest_or_fleet_is_refused_by_name() -> None:
    for name in ("manifest.json", "fleet.json"):
        store = Meddler(lambda key, name=name: key.endswith(name), lambda data: data[:-1])
        with pytest.raises(ObjectCorrupt, match=name):
            begin(join(store, 0, 1), SCALAR)


def test_a_checkpoint_of_another_run_is_not_taken() -> None:
    store = MemoryStore()
    begin(join(store, 0, 1, nonce="one"), SCALAR)
    with pytest.raises(ObjectCorrupt, match="another run"):
        checkpoints.read(store, "two", 0)


def test_a_sealed_run_says_so() -> None:
    with Fleet(2) as fleet:
        run = json.loads(fleet.store.get("fleet.json"))["nonce"]
        seal = Roster(run=run, round=0, attempt=0, writer=(0, 1), kind="sealed", reason="it goes on in epoch 1")
        fleet.store.put_if_absent(keys.roster(0, 0), dump_roster(seal))
        errors = fleet.round(0, {0: 1.0, 1: 1.0})
        assert all(isinstance(error, Fenced) and "epoch 1" in str(error) for error in errors.values())


# -- stores that fail


class Flaky(MemoryStore):
    """Each thread's every fourth request fails; half of the writes among these have been done nevertheless."""

    def __init__(self) -> None:
        super().__init__("flaky")
        self.mine = threading.local()

    def _fails(self) -> bool:
        self.mine.count = getattr(self.mine, "count", 0) + 1
        return self.mine.count % 4 == 0

    def put(self, key: str, data: Buffer) -> None:
        if self._fails():
            super().put(key, data)
            raise StoreError("503 after the write")
        super().put(key, data)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        if self._fails():
            raise StoreError("503 before the write")
        super().put_if_absent(key, data)
        if self._fails():
            raise StoreError("503 after the write")

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        if self._fails():
            raise StoreError("503")
        return super().get(key, max_bytes=max_bytes)

    def list(self, prefix: str) -> list[str]:
        if self._fails():
            raise StoreError("503")
        return super().list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        if self._fails():
            raise StoreError("503")
        super().delete(keys)


def test_requests_that_fail_now_and_then_change_nothing() -> None:
    naps: list[float] = []
    with Fleet(3, Flaky(), mode="sharded", sleep=lambda s: (naps.append(s), time.sleep(s / 50))[0]) as fleet:
        for number in range(3):
            outcomes = fleet.round(number, {0: 3.0, 1: 5.0, 2: 7.0})
            assert {scalar(outcome) for outcome in outcomes.values()} == {5.0}
    assert 0.1 in naps, "a pause comes before the next try"


class Broken(MemoryStore):
    def put(self, key: str, data: Buffer) -> None:
        if "/in/" in key:
            raise StoreError("the disk is full")
        super().put(key, data)


def test_a_store_that_stays_broken_is_an_error() -> None:
    with Fleet(1, Broken(), sleep=lambda s: None) as fleet:
        error = fleet.round(0, {0: 1.0})[0]
        assert isinstance(error, StoreError) and "disk is full" in str(error)


class LetsBothWin(MemoryStore):
    def put_if_absent(self, key: str, data: Buffer) -> None:
        self.put(key, data)


class ForgetsWrites(MemoryStore):
    def put_if_absent(self, key: str, data: Buffer) -> None:
        if "ready/" in key:
            return
        super().put_if_absent(key, data)


def test_a_store_without_create_if_absent_is_refused_at_the_start() -> None:
    with pytest.raises(StoreError, match="lets two writers create the same object"):
        begin(join(LetsBothWin(), 0, 1), SCALAR)


def test_a_store_that_does_not_show_what_was_written() -> None:
    with Fleet(1, ForgetsWrites()) as fleet:
        error = fleet.round(0, {0: 1.0})[0]
        assert isinstance(error, StoreError) and "ready/0.json" in str(error)


def test_create_if_absent_is_what_the_probe_relies_on() -> None:
    store = MemoryStore()
    store.put_if_absent("k", b"")
    with pytest.raises(ObjectExists):
        store.put_if_absent("k", b"")


# -- clocks


def test_the_time_of_day_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks that are an hour apart, and jump between any two looks."""
    jumps = random.Random(1)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jumps.choice((-3600.0, 0.0, 3600.0)))
    with Fleet(3, failure_policy="skip", timeout_seconds=20.0) as fleet:
        for number in range(4):
            outcomes = fleet.round(number, {0: 3.0, 1: 5.0, 2: 7.0})
            assert {scalar(outcome) for outcome in outcomes.values()} == {5.0}
            assert all(outcome.absent == {} for outcome in outcomes.values())
