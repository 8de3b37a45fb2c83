"""What every store must do. A test module hands in a store, and a picklable way to open it from another process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from composer_replication.errors import ObjectCorrupt, ObjectExists, ObjectMissing
from composer_replication.store import ObjectStore

Opener = Callable[[], ObjectStore]
BAD_KEYS = ["", "/a", "a/", "a//b", "../a", "a/../b", ".", "./a", "a\\b", "a\0b", "a\nb", ".tmp-1", "a/.hidden"]


def check_objects(store: ObjectStore) -> None:
    store.put_if_absent("a/b/one", b"first")
    with pytest.raises(ObjectExists, match="a/b/one"):
        store.put_if_absent("a/b/one", b"second")
    assert store.get("a/b/one") == b"first"
    store.put("a/b/one", bytearray(b"third"))
    store.put("a/b/one", memoryview(b"fourth!"))
    assert store.get("a/b/one") == b"fourth!"
    assert store.get("a/b/one", max_bytes=7) == b"fourth!"
    with pytest.raises(ObjectCorrupt, match="a/b/one"):
        store.get("a/b/one", max_bytes=6)
    store.put_if_absent("a/empty", b"")
    assert store.get("a/empty") == b""
    for missing in ("a/c", "a", "a/b", "b/one"):
        with pytest.raises(ObjectMissing, match=missing):
            store.get(missing)


def check_ranges(store: ObjectStore) -> None:
    store.put("r", bytes(range(100)))
    assert store.get_range("r", 10, 13) == bytes([10, 11, 12])
    assert store.get_range("r", 98, 200) == bytes([98, 99])
    assert store.get_range("r", 200, 300) == b""
    with pytest.raises(ObjectMissing):
        store.get_range("s", 0, 1)
    with pytest.raises(ValueError, match="range"):
        store.get_range("r", 3, 1)


def check_list_and_delete(store: ObjectStore) -> None:
    keys = ["l/1", "l/10/x", "l/2", "l/10/y", "m/1"]
    for key in keys:
        store.put(key, key.encode())
    assert store.list("l/") == ["l/1", "l/10/x", "l/10/y", "l/2"]
    assert store.list("l/1") == ["l/1", "l/10/x", "l/10/y"]
    assert store.list("l/10/") == ["l/10/x", "l/10/y"]
    assert store.list("nothing/") == []
    assert set(keys) <= set(store.list(""))
    store.delete(["l/10/x", "l/never", "l/2"])
    assert store.list("l/") == ["l/1", "l/10/y"]
    store.delete(["l/10/y"])
    with pytest.raises(ObjectMissing):
        store.get("l/10/y")
    store.put_if_absent("l/10/z", b"the folder is there again")
    assert store.list("l/10/") == ["l/10/z"]


def check_bad_keys(store: ObjectStore) -> None:
    for key in BAD_KEYS:
        for call in (
            lambda key=key: store.put(key, b""),
            lambda key=key: store.put_if_absent(key, b""),
            lambda key=key: store.get(key),
            lambda key=key: store.get_range(key, 0, 1),
            lambda key=key: store.delete([key]),
        ):
            with pytest.raises(ValueError, match="not a key"):
                call()


def check_race_of_threads(store: ObjectStore, threads: int = 4, keys: int = 40) -> None:
    wins: list[int] = []

    def run(who: int) -> None:
        for key in range(keys):
            try:
                store.put_if_absent(f"race/{key}", f"{who}".encode())
                wins.append(key)
            except ObjectExists:
                pass

    workers = [threading.Thread(target=run, args=(who,)) for who in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(wins) == list(range(keys))


def _race(opener: Opener, who: int, keys: int, barrier: Any, out: Any) -> None:
    store, won = opener(), []
    barrier.wait()
    for key in range(keys):
        try:
            store.put_if_absent(f"contest/{key}", f"{who}".encode() * 1000)
            won.append(key)
        except ObjectExists:
            pass
    out.put((who, won))


def check_race_of_processes(opener: Opener, processes: int = 4, keys: int = 60) -> None:
    """Every key has exactly one winner, and holds what the winner wrote."""
    context = multiprocessing.get_context("spawn")
    barrier, out = context.Barrier(processes), context.Queue()
    workers = [context.Process(target=_race, args=(opener, who, keys, barrier, out)) for who in range(processes)]
    for worker in workers:
        worker.start()
    results = dict(out.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0
    winners = {key: who for who, won in results.items() for key in won}
    assert sum(len(won) for won in results.values()) == len(winners) == keys
    store = opener()
    for key, who in winners.items():
        assert store.get(f"contest/{key}") == f"{who}".encode() * 1000


def _answer(opener: Opener, rounds: int) -> None:
    store = opener()
    for i in range(rounds):
        while True:
            try:
                question = store.get(f"talk/question/{i}")
                break
            except ObjectMissing:
                time.sleep(0.002)
        store.put_if_absent(f"talk/answer/{i}", question[::-1])


def check_seen_by_other_processes(opener: Opener, rounds: int = 20) -> None:
    """What one process has written, another one's next look at that key finds, also a key that it has missed before."""
    context = multiprocessing.get_context("spawn")
    other = context.Process(target=_answer, args=(opener, rounds))
    store = opener()
    other.start()
    try:
        for i in range(rounds):
            with pytest.raises(ObjectMissing):
                store.get(f"talk/answer/{i}")
            store.put_if_absent(f"talk/question/{i}", f"abc{i}".encode())
            give_up = time.monotonic() + 30
            while True:
                try:
                    assert store.get(f"talk/answer/{i}") == f"abc{i}".encode()[::-1]
                    break
                except ObjectMissing:
                    assert time.monotonic() < give_up and other.exitcode in (None, 0), (
                        "no answer from the other process"
                    )
                    time.sleep(0.002)
            assert f"talk/answer/{i}" in store.list("talk/")
    finally:
        other.join(timeout=30)
    assert other.exitcode == 0


def _write_big(opener: Opener, started: Any, size: int) -> None:
    store, data = opener(), b"\xa5" * size
    started.set()
    store.put_if_absent("big/object", data)


def check_killed_writer(opener: Opener, beginnings: Callable[[], int], size: int = 64 * 1024 * 1024) -> None:
    """A writer killed in the middle leaves nothing that a reader takes for the object; writing again is harmless.

    `beginnings()` gives the bytes of unfinished writes on the store's medium: the kill shall fall in the middle.
    """
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    store = opener()
    writer = context.Process(target=_write_big, args=(opener, started, size))
    writer.start()
    assert started.wait(30)
    seen: set[int] = set()
    half_written = 0
    give_up = time.monotonic() + 30
    while half_written < size // 8 and time.monotonic() < give_up:
        try:
            seen.add(len(store.get("big/object")))
            break
        except ObjectMissing:
            half_written = beginnings()
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join(timeout=30)
    try:
        seen.add(len(store.get("big/object")))
    except ObjectMissing:
        pass
    assert half_written >= size // 8, "the kill came too late to prove anything"
    assert seen <= {size}, f"a torn object was seen: {seen}"
    assert store.list("big/") == (["big/object"] if seen else [])
    if not seen:
        store.put_if_absent("big/object", b"\xa5" * size)
    assert store.get("big/object") == b"\xa5" * size
