"""One bit of one object turned over, when it is written or while it lies there: the fleet ends with the right bits, or
stops and names the object. Never does it go on with others.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from composer_replication.errors import ReplicationError
from composer_replication.store import Buffer, LocalStore, MemoryStore, ObjectStore, open_store
from tests.faults.fleet import Fleet, agree
from tests.faults.registry import Case, covers

KEYS: dict[str, str] = {
    "claim": r"claims/1/\d+$",
    "fleet": r"fleet\.json$",
    "member": r"members/1\.json$",
    "layout": r"layouts/",
    "input": r"rounds/00000001/0/in/1\.",
    "ready": r"rounds/00000001/0/ready/1",
    "roster": r"rounds/00000001/0/roster",
    "mean": r"rounds/00000001/0/mean/1",
    "output": r"rounds/00000001/0/out/",
    "checkpoint": r"checkpoints/00000000/[0-9a-f]+$",
    "manifest": r"checkpoints/00000000/manifest",
    "result": r"results/1",
}


class Flipping:
    """A store in which a bit of the first object that fits turns over: as it is written, or once it has been read."""

    def __init__(self, store: ObjectStore, fits: str, when: str, where: float) -> None:
        self._store, self._fits, self._when, self._where = store, re.compile(fits), when, where
        self._lock, self.struck = threading.Lock(), False

    @property
    def uri(self) -> str:
        return self._store.uri

    def put(self, key: str, data: Buffer) -> None:
        self._store.put(key, self._written(key, bytes(data)))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self._store.put_if_absent(key, self._written(key, bytes(data)))

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        data = self._store.get(key, max_bytes=max_bytes)
        if self._when == "lying there" and self._strikes(key):
            self._store.put(key, self._flip(data))
        return data

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self._store.get_range(key, start, stop)

    def list(self, prefix: str) -> list[str]:
        return self._store.list(prefix)

    def delete(self, keys: list[str]) -> None:
        self._store.delete(keys)

    def _strikes(self, key: str) -> bool:
        with self._lock:
            if self.struck or self._fits.match(key) is None:
                return False
            self.struck = True
            return True

    def _written(self, key: str, data: bytes) -> bytes:
        return self._flip(data) if self._when == "as it is written" and self._strikes(key) else data

    def _flip(self, data: bytes) -> bytes:
        place = min(int(self._where * len(data)), len(data) - 1)
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def store_for(case: Case, folder: Path, request: pytest.FixtureRequest) -> ObjectStore:
    made: dict[str, Callable[[], ObjectStore]] = {
        "memory": MemoryStore,
        "files": lambda: LocalStore(folder / "store"),
        "s3": lambda: open_store(request.getfixturevalue("s3_uri")),
    }
    return made[case.store]()


@covers("flipped bit")
def test_a_flipped_bit(case: Case, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    what, when, where = case.point
    store = Flipping(store_for(case, tmp_path, request), KEYS[what], when, where)
    fleet = Fleet(
        tmp_path,
        store,
        policy=case.policy,
        rounds=3,
        timeout_seconds=2.0,
        start_timeout_seconds=15.0 if what not in ("fleet", "manifest", "checkpoint") else 3.0,
        tolerated_misses=0,
    )
    lives = fleet.run()
    agree(lives)
    assert store.struck, "no such object was written and read"
    for life in lives:
        assert life.digest or isinstance(life.error, ReplicationError), life.text
    told = [life.text for life in lives if life.error is not None]
    if what in ("claim", "member", "layout", "result"):
        assert told == [], "nothing that the rounds rest on"
    elif told:
        assert any(re.search(r"rounds/0|checkpoints/0|fleet\.json|replica 1|state", text) for text in told), told
    elif what in ("input", "output", "ready"):
        assert all(life.digest for life in lives)
