"""The tensors' side of a round: encode and upload, average a shard, fetch and verify what was committed.

Invariant: nothing is used before its size and hash are what a pointer says. What is long is begun here and goes on in
threads (`Busy`); asked again, the same action gives what came of it. Chunks that wait lie in spools, in memory up to a
bound and in a temporary file beyond it; besides, only a few chunks each way are held.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from composer_replication.collective.base import Contribution
from composer_replication.collective.codec import check_chunk, chunk_bytes, content_hash, decode_chunk, encode_chunk
from composer_replication.collective.guards import Guards
from composer_replication.collective.layout import Layout
from composer_replication.collective.membership import treat
from composer_replication.collective.object_store import keys
from composer_replication.collective.object_store.events import (
    Busy,
    Fetch,
    Fetched,
    Reduce,
    Reduced,
    Spoiled,
    Unfetched,
    Uploaded,
)
from composer_replication.collective.object_store.forecast import Forecast
from composer_replication.collective.object_store.inputs import Inputs
from composer_replication.collective.object_store.pointers import ChunkFact, Ready
from composer_replication.collective.object_store.roster import shard_chunks
from composer_replication.collective.object_store.spool import Spool
from composer_replication.collective.object_store.workers import Workers
from composer_replication.collective.reduce import parameter_parts, part_sizes, reduce_chunk
from composer_replication.errors import ObjectCorrupt, ObjectMissing
from composer_replication.store.base import ObjectStore

__all__ = ["ShardWork", "Trace", "input_sizes", "output_sizes"]

READ_TRIES = 3  # a transfer may be damaged; an object that is damaged stays so

Trace = Callable[[str], None]


class _Spoil(Exception):
    def __init__(self, culprit: int, reason: str, gone: bool) -> None:
        super().__init__(reason)
        self.culprit, self.reason, self.gone = culprit, reason, gone


def input_sizes(codec: str, run: str, round: int, layout: Layout, replica: int) -> list[int]:
    """Bytes of each encoded chunk of a contribution."""
    return [
        chunk_bytes(codec, part_sizes(chunk), _input_fields(run, round, replica, index))
        for index, chunk in enumerate(layout.chunks)
    ]


def output_sizes(codec: str, run: str, round: int, layout: Layout) -> list[int]:
    """Bytes of each encoded chunk of the mean."""
    return [
        chunk_bytes(codec, part_sizes(chunk), _output_fields(run, round, index))
        for index, chunk in enumerate(layout.chunks)
    ]


def _input_fields(run: str, round: int, replica: int, chunk: int) -> dict[str, object]:
    return {"run": run, "round": round, "replica": replica, "chunk": chunk}


def _output_fields(run: str, round: int, chunk: int) -> dict[str, object]:
    return {"run": run, "round": round, "chunk": chunk}


class ShardWork:
    """One replica's tensors in one round."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        codec: str,
        run: str,
        round: int,
        layout: Layout,
        replica: int,
        incarnation: int,
        contribution: Contribution | None,
        forecast: Forecast,
        incarnations: Mapping[int, int],
        poll_seconds: float,
        max_poll_seconds: float,
        sleep: Callable[[float], None],
        trace: Trace,
        guards: Guards | None = None,
    ) -> None:
        self._store = store
        self._codec = codec
        self._run = run
        self._round = round
        self._layout = layout
        self._replica = replica
        self._incarnation = incarnation
        self._contribution = contribution
        self._forecast = forecast
        self._incarnations = incarnations
        self._polls = (poll_seconds, max_poll_seconds)
        self._trace = trace
        self._guards = guards or Guards()
        self._largest = max(input_sizes(codec, run, round, layout, replica), default=0)
        self._workers = Workers(self._largest, sleep)
        self._inputs = Inputs(store, self._workers, self._fetch_input)
        self._jobs: dict[tuple[object, ...], Future[Any]] = {}
        # upload
        self._to_encode: deque[int] | None = None
        self._facts: dict[int, ChunkFact] = {}
        self._puts: deque[Future[None]] = deque()
        self._buffers: list[bytearray] = []
        # means
        self._attempt = 0
        self._spool = Spool()
        self._spooled: dict[int, tuple[int, ChunkFact]] = {}  # chunk -> where it begins, what it is
        self.blobs: list[str] = []  # what this replica wrote, to be collected later
        self._lock = threading.Lock()
        self.seconds = {"encode": 0.0, "write": 0.0, "read": 0.0, "reduce": 0.0, "decode": 0.0}  # over all threads

    # -- the machine's actions

    def upload(self, attempt: int) -> Uploaded | Busy:
        """Encode, in the caller's thread, as many chunks as there is room for; they are written meanwhile."""
        assert self._contribution is not None
        if self._to_encode is None:
            self._to_encode = deque(self._forecast.order)
            self._scout(attempt)
        while self._to_encode:
            while self._puts and self._puts[0].done():
                self._puts.popleft().result()
            if len(self._puts) >= self._workers.sending:
                return Busy()
            self._encode(attempt, self._to_encode.popleft())
        while self._puts:
            if not self._puts[0].done():
                return Busy()
            self._puts.popleft().result()
        self._buffers.clear()
        return Uploaded(tuple(self._facts[index] for index in range(len(self._layout.chunks))))

    def reduce(self, action: Reduce) -> Reduced | Spoiled | Busy:
        self._enter(action.attempt)
        return self._ask(("reduce", action.attempt, action.shard), lambda: self._average(action))

    def fetch(self, action: Fetch) -> Fetched | Unfetched | Busy:
        roster, verdict = action.roster, action.verdict
        self._enter(action.attempt)
        indices = shard_chunks(roster, verdict.shard, len(self._layout.chunks))
        if len(indices) != len(verdict.chunks):
            key = keys.mean(self._round, action.attempt, verdict.shard)
            return Unfetched(f"{key} has {len(verdict.chunks)} chunks, expected {len(indices)}", gone=False)
        wanted = [
            (index, fact) for index, fact in zip(indices, verdict.chunks, strict=True) if not self._holds(index, fact)
        ]
        if not wanted:
            self._trace("before:fetch")
            self._trace("after:fetch")
            return Fetched()
        if roster.mode == "direct":
            index = wanted[0][0]
            if index not in self._spooled:
                return Unfetched(f"chunk {index} of round {self._round} hasn't been averaged here", gone=True)
            return Unfetched(f"chunk {index} of round {self._round} averages to other bits here", False, True)
        name = ("fetch", action.attempt, verdict.shard)
        return self._ask(name, lambda: self._download(action.attempt, wanted), self._workers.downloads)

    @property
    def active(self) -> bool:
        """Is this replica itself at work, rather than waiting for others?"""
        return self._workers.active

    def wait(self, seconds: float) -> None:
        """Until something that was Busy has got on, at most `seconds`."""
        self._workers.wait(seconds)

    def give_up(self) -> None:
        """The round has failed here, or this process is to stop: don't try again what is under way."""
        self._workers.give_up()

    def settle(self) -> None:
        """The round is over: no thread is left, and what `mean` needs stays."""
        self._inputs.stop_scouting()
        self._workers.stop()
        self._inputs.close()
        self._jobs.clear()

    # -- what comes out

    def mean(self, index: int, out: Tensor) -> None:
        """Decode the committed mean of a chunk into `out`."""
        began = time.perf_counter()
        offset, fact = self._spooled[index]
        data = bytearray(self._spool.get(offset, fact.size))
        decode_chunk(self._codec, part_sizes(self._layout.chunks[index]), data, out=out)
        self._clock("decode", began)

    def close(self) -> None:
        self.settle()
        self._spool.close()

    # -- upload

    def _scout(self, attempt: int) -> None:
        poll, most = self._polls
        self._inputs.scout(
            self._round,
            attempt,
            self._forecast.wanted,
            self._incarnations,
            max_bytes=self._largest + 64,  # headers differ by some digits
            poll_seconds=poll,
            max_poll_seconds=most,
        )

    def _encode(self, attempt: int, index: int) -> None:
        assert self._contribution is not None
        began = time.perf_counter()
        values = self._contribution.chunk(index)
        fields = _input_fields(self._run, self._round, self._replica, index)
        used = self._buffers.pop() if self._buffers else None
        buffer = encode_chunk(self._codec, part_sizes(self._layout.chunks[index]), values, fields, out=used)
        fact = self._facts[index] = ChunkFact(content_hash(buffer), len(buffer))
        if index in self._forecast.kept:
            self._inputs.keep(self._replica, index, fact, buffer)
        self._clock("encode", began)
        key = keys.input_chunk(self._round, attempt, self._replica, self._incarnation, index)

        def write() -> None:
            self._trace("before:upload")
            self._put(key, buffer)
            self._trace("after:upload")
            self._buffers.append(buffer)

        self._puts.append(self._workers.begin(self._workers.uploads, write))

    # -- average

    def _average(self, action: Reduce) -> Reduced | Spoiled:
        self._trace("before:reduce")
        reduced = self._averaged(action)
        self._trace("after:reduce")
        return reduced

    def _averaged(self, action: Reduce) -> Reduced | Spoiled:
        roster = action.roster
        weights = [report.weight for report in roster.members]
        scales, trim = treat(roster.members, self._guards).scales, self._guards.trim(len(roster.members))
        indices = shard_chunks(roster, action.shard, len(self._layout.chunks))
        for ready in action.readies:
            if len(ready.chunks) != len(self._layout.chunks):
                return Spoiled(ready.replica, f"its ready has {len(ready.chunks)} chunks")
        stream = self._inputs.stream([(ready, index) for index in indices for ready in action.readies])
        facts: list[ChunkFact] = []
        puts: deque[Future[None]] = deque()
        for index in indices:
            chunk = self._layout.chunks[index]
            reading: list[Ready] = []
            waited = 0.0

            def payloads(index: int = index, reading: list[Ready] = reading) -> Iterator[bytes]:
                nonlocal waited
                for ready in action.readies:
                    reading.append(ready)
                    began = time.perf_counter()
                    data = self._checked(stream, ready, index)
                    waited += time.perf_counter() - began
                    yield data

            began = time.perf_counter()
            try:
                reduced = reduce_chunk(
                    self._codec,
                    part_sizes(chunk),
                    payloads(),
                    weights,
                    scales=scales,
                    trim=trim,
                    parameters=parameter_parts(self._layout, chunk),
                    fields=self._output_fields(index),
                )
            except _Spoil as spoil:
                return Spoiled(spoil.culprit, spoil.reason, spoil.gone)
            except ObjectCorrupt as error:  # what only the decoding itself can find
                return Spoiled(reading[-1].replica, f"{self._input_key(reading[-1], index)}: {error}")
            self._clock("reduce", began + waited)
            payload = reduced.payload
            fact = ChunkFact(content_hash(payload), len(payload), reduced.square_norm, reduced.finite)
            if not reduced.finite:
                fact = ChunkFact(fact.hash, 0, 0.0, False)
            elif roster.mode == "sharded":
                key = keys.output_chunk(self._round, action.attempt, fact.hash)
                if len(puts) == self._workers.sending:
                    puts.popleft().result()
                puts.append(self._workers.means.submit(self._put, key, payload))
            self._keep(action.attempt, index, fact, payload)
            facts.append(fact)
        for put in puts:
            put.result()
        return Reduced(tuple(facts))

    def _checked(self, stream: Iterator[bytes], ready: Ready, index: int) -> bytes:
        sizes = part_sizes(self._layout.chunks[index])
        fields = _input_fields(self._run, self._round, ready.replica, index)
        try:
            data = next(stream)
            check_chunk(self._codec, sizes, data, fields)
            return data
        except ObjectMissing as error:
            raise _Spoil(ready.replica, str(error), True) from error
        except ObjectCorrupt as error:
            raise _Spoil(ready.replica, f"{self._input_key(ready, index)}: {error}", False) from error

    def _input_key(self, ready: Ready, index: int) -> str:
        return keys.input_chunk(self._round, ready.blob_attempt, ready.replica, ready.blob_incarnation, index)

    def _fetch_input(self, ready: Ready, index: int) -> bytes:
        return self._verified(self._input_key(ready, index), ready.chunks[index])

    # -- fetch

    def _download(self, attempt: int, wanted: list[tuple[int, ChunkFact]]) -> Fetched | Unfetched:
        self._trace("before:fetch")
        fetched = self._downloaded(attempt, wanted)
        self._trace("after:fetch")
        return fetched

    def _downloaded(self, attempt: int, wanted: list[tuple[int, ChunkFact]]) -> Fetched | Unfetched:
        for index, fact in wanted:
            key = keys.output_chunk(self._round, attempt, fact.hash)
            try:
                data = self._verified(key, fact)
                check_chunk(self._codec, part_sizes(self._layout.chunks[index]), data, self._output_fields(index))
            except ObjectMissing as error:
                return Unfetched(str(error), gone=True)
            except ObjectCorrupt as error:
                return Unfetched(f"{key}: {error}", gone=False)
            self._keep(attempt, index, fact, data)
        return Fetched()

    def _holds(self, index: int, fact: ChunkFact) -> bool:
        held = self._spooled.get(index)
        return held is not None and held[1] == fact

    # -- inside

    def _ask(self, name: tuple[object, ...], call: Callable[[], Any], pool: ThreadPoolExecutor | None = None) -> Any:
        """What came of `call`, if it has ended; it is begun when it is first asked for."""
        if name not in self._jobs:
            self._jobs[name] = self._workers.begin(pool or self._workers.averages, call)
        if not self._jobs[name].done():
            return Busy()
        return self._jobs.pop(name).result()

    def _enter(self, attempt: int) -> None:
        """There is a roster: nothing more is guessed, and the means of an attempt that failed don't count."""
        self._inputs.stop_scouting()
        if attempt != self._attempt:
            with self._lock:
                self._attempt = attempt
                self._spooled.clear()

    def _put(self, key: str, data: bytearray) -> None:
        began = time.perf_counter()
        self._store.put(key, data)
        self._clock("write", began)
        self.blobs.append(key)

    def _verified(self, key: str, fact: ChunkFact) -> bytes:
        if fact.size > self._largest + 64:  # a pointer may say anything: what can't be a chunk isn't read
            raise ObjectCorrupt(f"its pointer says {fact.size} bytes, no chunk has more than {self._largest + 64}")
        for last in (*[False] * (READ_TRIES - 1), True):
            began = time.perf_counter()
            try:
                data = self._store.get(key, max_bytes=fact.size)
                if len(data) != fact.size:
                    raise ObjectCorrupt(f"{len(data)} bytes, expected {fact.size}")
                if content_hash(data) != fact.hash:
                    raise ObjectCorrupt(f"its content has not the hash {fact.hash}")
                return data
            except ObjectCorrupt:
                if last:
                    raise
            finally:
                self._clock("read", began)
        raise AssertionError("the last try returns or raises")

    def _keep(self, attempt: int, index: int, fact: ChunkFact, data: bytes | bytearray) -> None:
        place = self._spool.put(data)
        with self._lock:
            if attempt == self._attempt:
                self._spooled[index] = (place, fact)

    def _output_fields(self, chunk: int) -> dict[str, object]:
        return _output_fields(self._run, self._round, chunk)

    def _clock(self, what: str, began: float) -> None:
        spent = time.perf_counter() - began
        with self._lock:
            self.seconds[what] += spent
