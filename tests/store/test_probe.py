"""The probe tells an honest store from those that break one promise each."""

from __future__ import annotations

import os

import pytest

from composer_replication.errors import ObjectMissing, StoreRefused, StoreUnavailable
from composer_replication.store import LocalStore, MemoryStore
from composer_replication.store.probe import Effort, probe_store

QUICK = Effort(repeats=4, contests=2, writers=4, max_bytes=2 * 1024 * 1024)


def verdicts(store, **options):
    found = probe_store(lambda: store, effort=QUICK, **options)
    return {finding.name: finding.verdict for finding in found.findings}, found


def test_an_honest_store(tmp_path):
    said: list[str] = []
    store = LocalStore(tmp_path)
    seen, found = verdicts(store, say=said.append)
    assert set(seen.values()) == {"ok"} and len(seen) == 6 and len(said) > 5
    assert abs(found.clock_offset_seconds) < 2
    assert set(found.latency_seconds) == {"write", "read", "create", "look for a missing key"}
    assert [(speed.size_bytes, speed.parallel) for speed in found.speeds] == [(65536, 1), (1048576, 1), (1048576, 4)]
    assert found.up > 0 and found.down > 0
    assert store.list("") == []


def test_a_store_that_lets_all_writers_win():
    class Careless(MemoryStore):
        def put_if_absent(self, key, data):
            self.put(key, data)

    seen, found = verdicts(Careless())
    assert seen.pop("create-if-absent") == "fails" and set(seen.values()) == {"ok"}
    assert "control=" in found.findings[0].means
    assert "create-if-absent" not in verdicts(Careless(), blobs_only=True)[0]


def test_a_store_that_looks_before_it_writes():
    """Refuses the second of two writes one after another, and lets several at once win."""
    import threading

    class Racy(MemoryStore):
        def __init__(self):
            super().__init__()
            self.looked = threading.Barrier(QUICK.writers)

        def put_if_absent(self, key, data):
            if key in self.list(""):
                return super().put_if_absent(key, data)
            if "contest" in key:
                self.looked.wait(timeout=30)  # everybody has looked, and nobody has written
            self.put(key, data)

    seen, found = verdicts(Racy())
    assert seen["create-if-absent"] == "fails" and f"of {QUICK.writers} writers at once" in found.findings[0].seen


def test_a_store_that_cannot_create_at_all():
    class Bucket(MemoryStore):
        def put_if_absent(self, key, data):
            raise StoreRefused("this store can't create an object only once")

    seen, found = verdicts(Bucket())
    assert seen["create-if-absent"] == "fails" and "can't create" in found.findings[0].seen


def test_a_store_that_shows_objects_late():
    class Late(MemoryStore):
        def __init__(self):
            super().__init__()
            self.hidden: dict[str, int] = {}

        def put(self, key, data):
            if key not in self.list(""):
                self.hidden[key] = 1
            super().put(key, data)

        def get(self, key, *, max_bytes=None):
            if self.hidden.pop(key, 0):
                raise ObjectMissing(key)
            return super().get(key, max_bytes=max_bytes)

    assert verdicts(Late())[0]["read after write"] == "fails"


def test_a_listing_that_lags_is_only_a_note():
    class Lagging(MemoryStore):
        def list(self, prefix):
            return [key for key in super().list(prefix) if "list-0" not in key]

    seen, _ = verdicts(Lagging())
    assert seen["list after write"] == "note" and list(seen.values()).count("ok") == 5


def test_a_folder_written_in_place_shows_half_objects(tmp_path):
    """What plain open() and write() do, and what a mount that uploads in the background does."""

    class InPlace(LocalStore):
        def put(self, key, data):
            path = self.root / key
            path.parent.mkdir(parents=True, exist_ok=True)
            view = memoryview(data)
            with open(path, "wb", buffering=0) as file:
                for start in range(0, len(view), 4096):
                    file.write(view[start : start + 4096])
                    os.fsync(file.fileno()) if start % (64 * 4096) == 0 else None

    store = InPlace(tmp_path)
    # Enough writing that a reader who looks every 5 ms comes in between.
    found = probe_store(lambda: store, effort=Effort(repeats=2, contests=1, writers=2, max_bytes=16 * 1024 * 1024))
    (atomic,) = [finding for finding in found.findings if finding.name == "atomic visibility"]
    assert atomic.verdict == "fails" and "unfinished" in atomic.seen


def test_ranges_that_are_ignored():
    class Whole(MemoryStore):
        def get_range(self, key, start, stop):
            return self.get(key) if "ranges" in key else super().get_range(key, start, stop)

    assert verdicts(Whole())[0]["ranged reads"] == "fails"


def test_what_was_made_is_removed_after_a_failure():
    class Breaking(MemoryStore):
        def list(self, prefix):
            raise StoreUnavailable("throttled")

    store = Breaking()
    with pytest.raises(StoreUnavailable):
        verdicts(store)
    assert store._objects == {}
