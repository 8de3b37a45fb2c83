"""The contributions' chunks that this replica averages: fetched ahead of the roster where they can be guessed.

Invariant: a chunk is given out only if it is, byte for byte, what a ready names; one that was fetched ahead and isn't
that is fetched again, from where the ready says.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from composer_replication.collective.codec import content_hash
from composer_replication.collective.object_store import keys
from composer_replication.collective.object_store.pointers import ChunkFact, Ready
from composer_replication.collective.object_store.spool import Spool
from composer_replication.collective.object_store.wire import MAX_POINTER_BYTES, load
from composer_replication.collective.object_store.workers import Workers
from composer_replication.errors import ObjectMissing
from composer_replication.store.base import ObjectStore

__all__ = ["MAX_LOOKS", "Inputs"]

MAX_LOOKS = 64  # in vain, for one replica in one round; after that its chunks are fetched when it is in the roster
ASK_AGAIN = 8  # looks in vain after which a replica may have been restarted

Fetcher = Callable[[Ready, int], bytes]


@dataclass(order=True)
class _Source:
    """Another replica's chunks that are wanted, in the order in which they appear."""

    due: float
    replica: int
    chunks: deque[int]
    incarnation: int | None
    pause: float = 0.0
    looks: int = 0  # in vain


class Inputs:
    """Chunks by (replica, index). `fetch` gets one that isn't here, verified."""

    def __init__(self, store: ObjectStore, workers: Workers, fetch: Fetcher) -> None:
        self._store = store
        self._workers = workers
        self._fetch = fetch
        self._spool = Spool()
        self._held: dict[tuple[int, int], tuple[int, str, int]] = {}  # offset, hash, size
        self._flying: set[tuple[int, int]] = set()
        self._sources: list[_Source] = []
        self._threads: list[threading.Thread] = []
        self._state = threading.Condition()
        self._stopped = False

    # -- ahead of the roster

    def keep(self, replica: int, index: int, fact: ChunkFact, data: bytes | bytearray) -> None:
        """Set a chunk aside that is at hand anyway."""
        self._held[replica, index] = (self._spool.put(data), fact.hash, fact.size)

    def scout(
        self,
        round: int,
        attempt: int,
        wanted: Mapping[int, Sequence[int]],
        incarnations: Mapping[int, int],
        *,
        max_bytes: int,
        poll_seconds: float,
        max_poll_seconds: float,
    ) -> None:
        """Begin to fetch what others will probably write. `incarnations` are guesses."""
        now = time.monotonic()
        self._sources = [
            _Source(now, replica, deque(chunks), incarnations.get(replica))
            for replica, chunks in wanted.items()
            if chunks
        ]
        heapq.heapify(self._sources)

        def run() -> None:
            while (source := self._next()) is not None:
                found = self._look(source, round, attempt, max_bytes)
                with self._state:
                    self._flying.discard((source.replica, source.chunks[0]))
                    if found:
                        source.chunks.popleft()
                        source.due, source.pause = 0.0, 0.0
                    else:
                        source.looks += 1
                        source.pause = min(max(source.pause * 1.5, poll_seconds), max_poll_seconds)
                        source.due = time.monotonic() + source.pause * (0.5 + 0.5 * random.random())
                    if source.chunks and source.looks < MAX_LOOKS:
                        heapq.heappush(self._sources, source)
                    self._state.notify_all()

        for index in range(min(self._workers.receiving, len(self._sources))):
            thread = threading.Thread(target=run, name=f"scout-{index}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _next(self) -> _Source | None:
        """The source to look at next, when it is due."""
        with self._state:
            while not self._stopped and (self._sources or self._flying):
                left = self._sources[0].due - time.monotonic() if self._sources else None
                if left is not None and left <= 0:
                    source = heapq.heappop(self._sources)
                    self._flying.add((source.replica, source.chunks[0]))
                    return source
                self._state.wait(left)
            return None

    def _look(self, source: _Source, round: int, attempt: int, max_bytes: int) -> bool:
        replica, index = source.replica, source.chunks[0]
        try:
            if source.incarnation is None or source.looks % ASK_AGAIN == ASK_AGAIN - 1:
                source.incarnation = self._incarnation(replica)
            if source.incarnation is None:
                return False
            key = keys.input_chunk(round, attempt, replica, source.incarnation, index)
            data = self._store.get(key, max_bytes=max_bytes)
            self.keep(replica, index, ChunkFact(content_hash(data), len(data)), data)
            return True
        except Exception:  # missing, or trouble, also with memory or the spool's disk: whoever averages finds out
            return False

    def _incarnation(self, replica: int) -> int | None:
        """What a replica last said of itself."""
        key = keys.member(replica)
        try:
            found = load(self._store.get(key, max_bytes=MAX_POINTER_BYTES), key).get("incarnation")
        except ObjectMissing:
            return None
        return found if isinstance(found, int) else None

    def stop_scouting(self) -> None:
        """What is being fetched still comes in; nothing new is looked for."""
        with self._state:
            self._stopped = True
            self._state.notify_all()

    # -- once the roster is there

    def stream(self, wants: Sequence[tuple[Ready, int]]) -> Iterator[bytes]:
        """These chunks in this order, some fetched while the ones before are being used."""
        ahead: deque[tuple[Ready, int, Future[bytes] | None]] = deque()
        coming = iter(wants)
        window = max(2, self._workers.receiving // 2)
        try:
            while True:
                while len(ahead) < window and (want := next(coming, None)) is not None:
                    held = self._holds(*want)
                    pool = self._workers.downloads
                    ahead.append((*want, None if held else pool.submit(self._take, *want)))
                if not ahead:
                    return
                ready, index, future = ahead.popleft()
                yield self._take(ready, index) if future is None else future.result()
        finally:
            for *_, future in ahead:
                if future is not None:
                    future.cancel()

    def _holds(self, ready: Ready, index: int) -> bool:
        held = self._held.get((ready.replica, index))
        return held is not None and held[1:] == (ready.chunks[index].hash, ready.chunks[index].size)

    def _take(self, ready: Ready, index: int) -> bytes:
        place = (ready.replica, index)
        with self._state:
            while place in self._flying:
                self._state.wait()
        if self._holds(ready, index):
            offset, content, size = self._held[place]
            data = self._spool.get(offset, size)
            if content_hash(data) == content:
                return data
        return self._fetch(ready, index)

    def settle(self) -> None:
        """No thread is left afterwards."""
        self.stop_scouting()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def close(self) -> None:
        self.settle()
        self._held.clear()
        self._spool.close()
