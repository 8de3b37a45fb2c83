"""The tensors' side of a round: encode and upload, average a shard, fetch and verify what was committed.

Invariant: nothing is used before its size and hash are what a pointer says, and no more than one chunk's sum is held at
a time: verified chunks of the mean wait in a spool, in memory up to a bound and in a temporary file beyond it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from typing import IO

from torch import Tensor

from composer_replication.collective.base import Contribution
from composer_replication.collective.codec import check_chunk, content_hash, decode_chunk, encode_chunk
from composer_replication.collective.guards import Guards
from composer_replication.collective.layout import Layout
from composer_replication.collective.membership import treat
from composer_replication.collective.object_store import keys
from composer_replication.collective.object_store.events import (
    Fetch,
    Fetched,
    Reduce,
    Reduced,
    Spoiled,
    Unfetched,
    Uploaded,
)
from composer_replication.collective.object_store.pointers import ChunkFact, Ready
from composer_replication.collective.object_store.roster import shard_chunks
from composer_replication.collective.reduce import parameter_parts, part_sizes, reduce_chunk
from composer_replication.errors import ObjectCorrupt, ObjectMissing
from composer_replication.store.base import ObjectStore

__all__ = ["SPOOL_BYTES", "ShardWork"]

SPOOL_BYTES = 64 * 1024 * 1024
READ_TRIES = 3  # a transfer may be damaged; an object that is damaged stays so

Trace = Callable[[str], None]


class _Spoil(Exception):
    def __init__(self, culprit: int, reason: str, gone: bool) -> None:
        super().__init__(reason)
        self.culprit, self.reason, self.gone = culprit, reason, gone


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
        trace: Trace,
        guards: Guards | None = None,
        spool_bytes: int = SPOOL_BYTES,
    ) -> None:
        self._store = store
        self._codec = codec
        self._run = run
        self._round = round
        self._layout = layout
        self._replica = replica
        self._incarnation = incarnation
        self._contribution = contribution
        self._trace = trace
        self._guards = guards or Guards()
        self._spool: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=spool_bytes)  # noqa: SIM115
        self._spooled: dict[int, tuple[int, ChunkFact]] = {}  # chunk -> where it begins, what it is
        self._reading = (replica, "")  # whose chunk is being averaged, and its key
        self.blobs: list[str] = []  # what this replica wrote, to be collected later
        self.seconds = {"encode": 0.0, "write": 0.0, "read": 0.0, "reduce": 0.0, "decode": 0.0}

    # -- the machine's actions

    def upload(self, attempt: int) -> Uploaded:
        assert self._contribution is not None
        facts: list[ChunkFact] = []
        buffer: bytearray | None = None
        for index, chunk in enumerate(self._layout.chunks):
            began = time.perf_counter()
            values = self._contribution.chunk(index)
            fields = self._input_fields(self._replica, index)
            buffer = encode_chunk(self._codec, part_sizes(chunk), values, fields, out=buffer)
            facts.append(ChunkFact(content_hash(buffer), len(buffer)))
            began = self._clock("encode", began)
            key = keys.input_chunk(self._round, attempt, self._replica, self._incarnation, index)
            self._trace("before:upload")
            self._store.put(key, buffer)
            self._trace("after:upload")
            self._clock("write", began)
            self.blobs.append(key)
        return Uploaded(tuple(facts))

    def reduce(self, action: Reduce) -> Reduced | Spoiled:
        roster = action.roster
        weights = [report.weight for report in roster.members]
        scales, trim = treat(roster.members, self._guards).scales, self._guards.trim(len(weights))
        facts: list[ChunkFact] = []
        for index in shard_chunks(roster, action.shard, len(self._layout.chunks)):
            chunk = self._layout.chunks[index]
            read_before, began = self.seconds["read"], time.perf_counter()
            try:
                reduced = reduce_chunk(
                    self._codec,
                    part_sizes(chunk),
                    self._inputs(action.readies, index),
                    weights,
                    scales=scales,
                    trim=trim,
                    parameters=parameter_parts(self._layout, chunk),
                    fields=self._output_fields(index),
                )
            except _Spoil as spoil:
                return Spoiled(spoil.culprit, spoil.reason, spoil.gone)
            except ObjectCorrupt as error:  # what only the decoding itself can find
                return Spoiled(self._reading[0], f"{self._reading[1]}: {error}")
            self._clock("reduce", began + self.seconds["read"] - read_before)
            payload = reduced.payload
            fact = ChunkFact(content_hash(payload), len(payload), reduced.square_norm, reduced.finite)
            if not reduced.finite:
                fact = ChunkFact(fact.hash, 0, 0.0, False)
            elif roster.mode == "sharded":
                began = time.perf_counter()
                key = keys.output_chunk(self._round, action.attempt, fact.hash)
                self._store.put(key, payload)
                self._clock("write", began)
                self.blobs.append(key)
            self._keep(index, fact, payload)
            facts.append(fact)
        return Reduced(tuple(facts))

    def fetch(self, action: Fetch) -> Fetched | Unfetched:
        roster, verdict = action.roster, action.verdict
        indices = shard_chunks(roster, verdict.shard, len(self._layout.chunks))
        if len(indices) != len(verdict.chunks):
            key = keys.mean(self._round, action.attempt, verdict.shard)
            return Unfetched(f"{key} has {len(verdict.chunks)} chunks, expected {len(indices)}", gone=False)
        for index, fact in zip(indices, verdict.chunks, strict=True):
            held = self._spooled.get(index)
            if held is not None and held[1] == fact:
                continue
            if roster.mode == "direct":
                if held is None:
                    return Unfetched(f"chunk {index} of round {self._round} hasn't been averaged here", gone=True)
                return Unfetched(f"chunk {index} of round {self._round} averages to other bits here", False, True)
            key = keys.output_chunk(self._round, action.attempt, fact.hash)
            try:
                data = self._verified(key, fact)
                check_chunk(self._codec, part_sizes(self._layout.chunks[index]), data, self._output_fields(index))
            except ObjectMissing as error:
                return Unfetched(str(error), gone=True)
            except ObjectCorrupt as error:
                return Unfetched(f"{key}: {error}", gone=False)
            self._keep(index, fact, data)
        return Fetched()

    # -- what comes out

    def mean(self, index: int, out: Tensor) -> None:
        """Decode the committed mean of a chunk into `out`."""
        began = time.perf_counter()
        offset, fact = self._spooled[index]
        self._spool.seek(offset)
        data = bytearray(self._spool.read(fact.size))
        decode_chunk(self._codec, part_sizes(self._layout.chunks[index]), data, out=out)
        self._clock("decode", began)

    def close(self) -> None:
        self._spool.close()

    # -- inside

    def _inputs(self, readies: tuple[Ready, ...], index: int) -> Iterator[bytes]:
        for ready in readies:
            key = keys.input_chunk(self._round, ready.blob_attempt, ready.replica, ready.blob_incarnation, index)
            if len(ready.chunks) != len(self._layout.chunks):
                raise _Spoil(ready.replica, f"its ready has {len(ready.chunks)} chunks", False)
            sizes, fields = part_sizes(self._layout.chunks[index]), self._input_fields(ready.replica, index)
            try:
                data = self._verified(key, ready.chunks[index])
                check_chunk(self._codec, sizes, data, fields)
            except ObjectMissing as error:
                raise _Spoil(ready.replica, str(error), True) from error
            except ObjectCorrupt as error:
                raise _Spoil(ready.replica, f"{key}: {error}", False) from error
            self._reading = (ready.replica, key)
            yield data

    def _verified(self, key: str, fact: ChunkFact) -> bytes:
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

    def _keep(self, index: int, fact: ChunkFact, data: bytes | bytearray) -> None:
        offset = self._spool.seek(0, 2)
        self._spool.write(data)
        self._spooled[index] = (offset, fact)

    def _input_fields(self, replica: int, chunk: int) -> dict[str, object]:
        return {"run": self._run, "round": self._round, "replica": replica, "chunk": chunk}

    def _output_fields(self, chunk: int) -> dict[str, object]:
        return {"run": self._run, "round": self._round, "chunk": chunk}

    def _clock(self, what: str, began: float) -> float:
        now = time.perf_counter()
        self.seconds[what] += now - began
        return now
