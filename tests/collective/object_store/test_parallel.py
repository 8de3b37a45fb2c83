"""What is done side by side, and ahead of the roster, gives the bits of what is done one after another."""

from __future__ import annotations

import json
import resource
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from composer_replication.collective.codec import content_hash
from composer_replication.collective.in_process import InProcessFleet
from composer_replication.collective.layout import Layout, Slot
from composer_replication.collective.object_store import ObjectStoreCollective, keys
from composer_replication.collective.object_store.forecast import forecast
from composer_replication.collective.object_store.inputs import MAX_LOOKS, Inputs
from composer_replication.collective.object_store.pointers import ChunkFact, Ready
from composer_replication.collective.object_store.roster import divide, shard_range
from composer_replication.collective.object_store.spool import Spool
from composer_replication.collective.object_store.workers import Workers
from composer_replication.errors import ObjectMissing, StoreError
from composer_replication.store import MemoryStore
from composer_replication.store.base import Buffer
from tests.collective.object_store.toy import Toy, run_toy
from tests.support.threads import run_threads


def wait_until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < give_up, "it didn't come"
        time.sleep(0.002)


MANY = Layout((Slot("w", (40, 4096), "torch.float32"), Slot("b", (5, 7), "x"), Slot("v", (4100,), "x")), 4096)


class Counting(MemoryStore):
    """Counts what is read and written, by the kind of object."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()
        self.found: Counter[str] = Counter()
        self.writes: Counter[str] = Counter()

    @staticmethod
    def kind(key: str) -> str:
        return key.split("/")[3].removesuffix(".json") if key.startswith("rounds/00000001/") else ""

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        with self._lock:
            self.reads[self.kind(key)] += 1
        data = super().get(key, max_bytes=max_bytes)
        with self._lock:
            self.found[self.kind(key)] += 1
        return data

    def put(self, key: str, data: Buffer) -> None:
        with self._lock:
            self.writes[self.kind(key)] += 1
        super().put(key, data)


def fleet(store: MemoryStore, replicas: int, rounds: int, **settings: Any) -> list[Toy]:
    quick = {"poll_seconds": 0.002, "max_poll_seconds": 0.02, "heartbeat_seconds": 5.0, "timeout_seconds": 30.0}

    def life(replica: int) -> Toy:
        collective = ObjectStoreCollective(store, replica=replica, replicas=replicas, **(quick | settings))
        return run_toy(Toy.fresh(replica, MANY), collective, rounds)

    return run_threads([lambda r=r: life(r) for r in range(replicas)])


@pytest.mark.parametrize(("replicas", "codec"), [(4, "int8"), (2, "bfloat16"), (3, "float32")])
def test_eight_shards_of_each_owner_give_the_bits_of_the_fleet_in_process(replicas: int, codec: str) -> None:
    collectives = InProcessFleet(replicas, codec=codec).collectives()
    reference = run_threads([lambda c=c: run_toy(Toy.fresh(c.replica, MANY), c, 3) for c in collectives])
    store = Counting()
    toys = fleet(store, replicas, 3, codec=codec, mode="sharded", checkpoint_every=100)
    assert {toy.digest for toy in toys} == {reference[0].digest}
    assert [toy.applied for toy in toys] == [reference[0].applied] * replicas

    chunks = len(MANY.chunks)
    roster = json.loads(store.get(keys.roster(1, 0)))
    assert roster["shards"] == 8 * replicas and Counter(roster["owners"]) == dict.fromkeys(range(replicas), 8)
    # Each chunk crosses to the one that averages it, and each mean to all the others: nobody reads its own.
    assert store.found["in"] == (replicas - 1) * chunks
    assert store.found["out"] == (replicas - 1) * chunks
    assert store.writes["in"] == replicas * chunks and store.writes["out"] == chunks


# -- who averages what


@pytest.mark.parametrize("replicas", [1, 3, 8, 70])
@pytest.mark.parametrize("chunks", [1, 8, 33, 300])
def test_parts_are_even_and_forecasts_agree(replicas: int, chunks: int) -> None:
    members = tuple(range(10, 10 + replicas))
    sizes = [5_000_000] * chunks
    direct, owners = divide("sharded", members, 5, chunks=chunks, payload_bytes=sum(sizes))
    assert not direct
    part = Counter[int]()
    for shard, owner in enumerate(owners):
        part[owner] += len(shard_range(len(owners), shard, chunks))
    assert sum(part.values()) == chunks
    assert max(part.values()) - min(part.get(member, 0) for member in members) <= 1
    assert len(owners) <= max(replicas, 64) and max(Counter(owners).values()) <= 8

    guesses = {member: forecast("sharded", members, member, 5, sizes) for member in members}
    for member, guess in guesses.items():
        assert sorted(guess.order) == list(range(chunks))
        assert len(guess.kept) == part.get(member, 0)
        if guess.kept:
            assert set(guess.order[-len(guess.kept) :]) == guess.kept, "one's own part comes last"
        for other, wanted in guess.wanted.items():
            assert set(wanted) == guess.kept
            assert sorted(wanted, key=guesses[other].order.index) == list(wanted), "as they will appear"


def test_direct_reading_reads_everything_and_keeps_nothing_back() -> None:
    guess = forecast("auto", (0, 1, 2), 1, 0, [1000, 1000])
    assert guess.wanted == {0: (0, 1), 2: (0, 1)} and guess.kept == frozenset()


# -- ahead of the roster


def ready(replica: int, *contents: bytes) -> Ready:
    facts = tuple(ChunkFact(content_hash(content), len(content)) for content in contents)
    return Ready(
        run="r", round=0, attempt=0, replica=replica, incarnation=1, blob_attempt=0, blob_incarnation=1, chunks=facts
    )


def scouting(store: MemoryStore, fetched: list[tuple[int, int]], wanted: dict[int, tuple[int, ...]]) -> Inputs:
    def fetch(which: Ready, index: int) -> bytes:
        fetched.append((which.replica, index))
        return store.get(keys.input_chunk(0, 0, which.replica, which.blob_incarnation, index))

    inputs = Inputs(store, Workers(1000, lambda seconds: None), fetch)
    inputs.scout(0, 0, wanted, dict.fromkeys(wanted, 1), max_bytes=1000, poll_seconds=0.0005, max_poll_seconds=0.001)
    return inputs


def test_what_was_read_ahead_is_used_only_if_it_is_what_the_ready_names() -> None:
    store, fetched = MemoryStore(), list[tuple[int, int]]()
    for index, content in enumerate((b"first", b"old", b"third")):
        store.put(keys.input_chunk(0, 0, 1, 1, index), content)
    inputs = scouting(store, fetched, {1: (0, 1, 2)})
    wait_until(lambda: len(inputs._held) == 3)
    store.put(keys.input_chunk(0, 0, 1, 1, 1), b"new")
    declared = ready(1, b"first", b"new", b"third")
    assert list(inputs.stream([(declared, index) for index in range(3)])) == [b"first", b"new", b"third"]
    assert fetched == [(1, 1)]
    inputs.close()


def test_looks_for_what_does_not_come_are_bounded() -> None:
    class Empty(MemoryStore):
        looks = 0

        def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
            self.looks += 1
            raise ObjectMissing(key)

    store = Empty()
    inputs = scouting(store, [], {1: (0, 1)})
    wait_until(lambda: not any(thread.is_alive() for thread in inputs._threads))
    # Now and then it asks instead which process holds that id, and still looks for the chunk afterwards.
    assert MAX_LOOKS <= store.looks <= MAX_LOOKS + MAX_LOOKS // 8
    inputs.close()


def test_a_restarted_writer_is_found_under_its_new_number() -> None:
    store, fetched = MemoryStore(), list[tuple[int, int]]()
    store.put(keys.member(1), b'{"incarnation": 2}')
    store.put(keys.input_chunk(0, 0, 1, 2, 0), b"from the second process")
    inputs = scouting(store, fetched, {1: (0,)})
    wait_until(lambda: len(inputs._held) == 1)
    inputs.close()


def test_a_read_ahead_that_fails_in_any_way_is_made_up_for() -> None:
    class Tight(MemoryStore):
        tight = True

        def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
            if self.tight:
                self.tight = False
                raise MemoryError
            return super().get(key, max_bytes=max_bytes)

    store, fetched = Tight(), list[tuple[int, int]]()
    store.put(keys.input_chunk(0, 0, 1, 1, 0), b"chunk")
    inputs = scouting(store, fetched, {1: (0,)})
    wait_until(lambda: not store.tight)
    got: list[bytes] = []
    reading = threading.Thread(target=lambda: got.extend(inputs.stream([(ready(1, b"chunk"), 0)])), daemon=True)
    reading.start()
    reading.join(timeout=20)
    with inputs._state:  # so that a failure ends, too
        inputs._flying.clear()
        inputs._state.notify_all()
    assert got == [b"chunk"]
    inputs.close()


def test_a_stream_ends_early_without_a_thread_left() -> None:
    store, fetched = MemoryStore(), list[tuple[int, int]]()
    for index in range(20):
        store.put(keys.input_chunk(0, 0, 1, 1, index), b"x")
    inputs = scouting(store, fetched, {})
    stream = inputs.stream([(ready(1, *[b"x"] * 20), index) for index in range(20)])
    assert next(stream) == b"x"
    stream.close()  # type: ignore[attr-defined]
    assert len(fetched) <= 1 + 4, "a few ahead, not all"
    inputs.close()


# -- threads


def test_a_wait_ends_with_the_work_and_not_before() -> None:
    slept: list[float] = []
    workers = Workers(1, slept.append)
    gate = threading.Event()
    future = workers.begin(workers.uploads, gate.wait)
    waiting = ThreadPoolExecutor(1).submit(workers.wait, 30.0)
    assert not waiting.done()
    gate.set()
    waiting.result(timeout=10)
    assert future.done() and not workers.active
    workers.wait(7.0)
    assert slept == [7.0], "nothing runs: a plain sleep"
    workers.stop()


def test_what_ended_before_the_wait_ends_it_at_once() -> None:
    workers = Workers(1, lambda seconds: pytest.fail("it must not sleep"))
    workers.begin(workers.uploads, lambda: None).result(timeout=10)
    wait_until(lambda: workers._running == 0)
    assert workers.active
    workers.wait(30.0)
    workers.stop()


def test_a_spool_gives_back_what_was_put_in_beyond_its_memory_too() -> None:
    spool = Spool(max_bytes=1000)
    contents = [torch.arange(100 + i, dtype=torch.uint8).numpy().tobytes() for i in range(50)]
    with ThreadPoolExecutor(8) as pool:
        places = list(pool.map(spool.put, contents))
        assert list(pool.map(lambda i: spool.get(places[i], len(contents[i])), range(50))) == contents
    spool.close()
    with pytest.raises(ValueError):
        spool.put(b"late")


def test_a_temporary_folder_without_room_is_named() -> None:
    spool = Spool(max_bytes=1000)
    first = spool.put(b"a" * 900)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # as a full disk: writing fails
    try:
        with pytest.raises(StoreError) as caught:
            spool.put(b"b" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert tempfile.gettempdir() in str(caught.value) and "100,900 bytes" in str(caught.value)
    assert "TMPDIR" in str(caught.value)
    with pytest.raises(StoreError, match="TMPDIR"):
        spool.get(first, 900)
    spool.close()
