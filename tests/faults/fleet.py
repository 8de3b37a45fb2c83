"""A fleet of toys in threads over any store, each with a line of its own that can be cut like a process's; and the
check that nothing was lost, which computes the whole run a second time from the objects alone.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from composer_replication.collective.codec import content_hash, decode_chunk
from composer_replication.collective.object_store import ObjectStoreCollective, checkpoints, keys
from composer_replication.collective.object_store.history import closed_roster
from composer_replication.collective.object_store.pointers import parse_ready, parse_verdict
from composer_replication.collective.object_store.requests import create, there
from composer_replication.collective.object_store.roster import shard_chunks
from composer_replication.collective.object_store.wire import load, pointer_hash
from composer_replication.collective.reduce import parameter_parts, part_sizes, reduce_chunk
from composer_replication.errors import ObjectExists, ObjectMissing, StoreRefused
from composer_replication.store import Buffer, ObjectStore
from tests.collective.object_store.toy import Toy, run_toy

__all__ = ["Fleet", "Killed", "Life", "Line", "agree", "blobs_of", "nothing_lost", "replay", "wait_for"]

Hook = Callable[[str, Toy], None]
WAIT_SECONDS = 200.0  # a bound for a machine that does much else


class Killed(BaseException):
    """Ends a replica where it is, as signal 9 would: nothing catches it, and nothing more of it reaches the store."""


def nothing(step: str, toy: Toy) -> None:
    """No fault."""


def wait_for(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < give_up, "it never came to that"
        time.sleep(0.002)


class Line:
    """One process's way to the store. `keep` picks writes that are under way when the process dies: they can be
    delivered later, as a network does that has accepted a request."""

    def __init__(self, store: ObjectStore, keep: Callable[[str], bool] = lambda key: False) -> None:
        self._store = store
        self._keep = keep
        self.kept: list[tuple[str, str, bytes]] = []
        self.cut = False

    @property
    def uri(self) -> str:
        return self._store.uri

    def put(self, key: str, data: Buffer) -> None:
        self._write("put", key, data)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self._write("put_if_absent", key, data)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        self._alive()
        return self._store.get(key, max_bytes=max_bytes)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        self._alive()
        return self._store.get_range(key, start, stop)

    def list(self, prefix: str) -> list[str]:
        self._alive()
        return self._store.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        self._alive()
        self._store.delete(keys)

    def deliver(self) -> None:
        for how, key, data in self.kept:
            try:
                getattr(self._store, how)(key, data)
            except ObjectExists:
                pass
        self.kept.clear()

    def _write(self, how: str, key: str, data: Buffer) -> None:
        self._alive()
        if self._keep(key):
            self.kept.append((how, key, bytes(data)))
            raise Killed
        getattr(self._store, how)(key, data)

    def _alive(self) -> None:
        if self.cut:
            raise StoreRefused("this process is dead")


@dataclass
class Life:
    """What one process of a replica came to."""

    replica: int
    applied: list[tuple[int, str]] = field(default_factory=list)  # round, digest after it
    digest: str = ""  # if it got to the end
    error: Exception | None = None
    killed: bool = False

    @property
    def text(self) -> str:
        return "" if self.error is None else f"{type(self.error).__name__}: {self.error}"


class Running:
    def __init__(self, live: Callable[[], Life]) -> None:
        self._lives: list[Life] = []
        self._thread = threading.Thread(target=lambda: self._lives.append(live()), daemon=True)
        self._thread.start()

    def join(self, seconds: float = WAIT_SECONDS) -> Life:
        self._thread.join(timeout=seconds)
        assert self._lives, "a replica is still waiting"
        return self._lives[0]


class Fleet:
    """Replicas over `store` (or one store each), with their records in `folder`."""

    def __init__(
        self,
        folder: Path,
        store: ObjectStore | Callable[[int], ObjectStore],
        *,
        policy: str = "strict",
        replicas: int = 3,
        rounds: int = 4,
        **settings: Any,
    ) -> None:
        self.folder = folder
        self.store_of = store if callable(store) else lambda replica: store
        self.replicas, self.rounds = replicas, rounds
        self.make: type[Toy] = Toy
        self._living, self._lived = Counter[int](), Counter[int]()
        self.settings: dict[str, Any] = {
            "codec": "int8",
            "mode": "sharded",
            "failure_policy": policy,
            "poll_seconds": 0.002,
            "max_poll_seconds": 0.02,
            "heartbeat_seconds": 0.1,
            "timeout_seconds": 30.0,
            "takeover_seconds": 0.2,
            "checkpoint_every": 1000,  # so that everything stays, and the run can be computed again
            **settings,
        }

    def live(
        self,
        replica: int,
        hook: Hook = nothing,
        *,
        fresh: bool = False,
        salt: int = 0,
        line: Any = None,
        **changes: Any,
    ) -> Life:
        """A process's whole life, in this thread."""
        self._bury(replica)
        record, life = self.folder / f"record-{replica}.pt", Life(replica)
        if fresh:
            record.unlink(missing_ok=True)
        resumed = record.exists()
        toy = self.make.load(replica, record) if resumed else self.make.fresh(replica)
        toy.salt = salt
        line = line if line is not None else Line(self.store_of(replica))

        def trace(step: str) -> None:
            try:
                hook(step, toy)
            except Killed:
                line.cut = True
                raise

        try:
            collective = ObjectStoreCollective(
                line, replica=replica, replicas=self.replicas, trace=trace, **{**self.settings, **changes}
            )
            run_toy(toy, collective, self.rounds, resumed=resumed, save=record, trace=trace)
            life.digest = toy.digest
        except Killed:
            line.cut = True
        except Exception as error:  # what a user would see
            life.error = None if line.cut else error
        life.killed = line.cut
        life.applied = toy.applied
        self._living[replica] -= 1
        return life

    def _bury(self, replica: int) -> None:
        """Say of earlier processes that they are dead, as the system does: here all are threads of one that lives."""
        if self._lived[replica] and not self._living[replica]:
            store = self.store_of(replica)
            number = 1
            while there(store, keys.claim(replica, number)):
                create(store, keys.closed(replica, number), b"{}")
                number += 1
        self._living[replica] += 1
        self._lived[replica] += 1

    def start(self, replica: int, hook: Hook = nothing, **options: Any) -> Running:
        return Running(lambda: self.live(replica, hook, **options))

    def run(self, hooks: dict[int, Hook] | None = None, **options: Any) -> list[Life]:
        """All of them, to their ends."""
        running = [self.start(i, (hooks or {}).get(i, nothing), **options) for i in range(self.replicas)]
        return [life.join() for life in running]


# -- what must hold


def agree(lives: Sequence[Life]) -> dict[int, str]:
    """All who applied a round hold the same bits after it, nobody applied one twice, and all ends are one. Gives the
    digest after each round."""
    after: dict[int, str] = {}
    for life in lives:
        numbers = [round for round, _ in life.applied]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True, numbers
        for round, digest in life.applied:
            assert after.setdefault(round, digest) == digest, f"round {round}: replica {life.replica} holds other bits"
    assert len({life.digest for life in lives if life.digest}) <= 1, "the ends differ"
    return after


def nothing_lost(store: ObjectStore, lives: Sequence[Life], *, codec: str = "int8") -> dict[int, str]:
    """The same; and each round's bits are what its roster's contributions come to, each counted once."""
    after = replay(store, codec)
    for round, digest in agree(lives).items():
        assert after.get(round) == digest, f"round {round} isn't what the objects in the store come to"
    return after


def replay(store: ObjectStore, codec: str) -> dict[int, str]:
    """The digest after each round, computed from the first weights, the rosters and the members' contributions."""
    run = str(load(store.get(keys.FLEET), keys.FLEET)["nonce"])
    toy = Toy.fresh(0)
    toy.adopt(checkpoints.read(store, run, 0))
    after: dict[int, str] = {}
    while (found := closed_roster(store, run, toy.round)) is not None:
        roster, layout = found.roster, toy.layout
        readies, facts = [], {}
        for report, wanted in zip(roster.members, roster.hashes, strict=True):
            key = keys.ready(roster.round, roster.attempt, report.replica)
            data = store.get(key)
            assert pointer_hash(data) == wanted and report.base == toy.digest, key
            readies.append(
                parse_ready(data, key, run=run, round=roster.round, attempt=roster.attempt, replica=report.replica)
            )
        try:
            for shard in range(roster.shards):
                place = {"run": run, "round": roster.round, "attempt": roster.attempt, "shard": shard}
                key = keys.mean(roster.round, roster.attempt, shard)
                verdict = parse_verdict(store.get(key), key, roster=found.hash, **place)
                facts |= zip(shard_chunks(roster, shard, len(layout.chunks)), verdict.chunks, strict=True)
        except ObjectMissing:
            return after  # a round that is under way
        means: dict[int, bytearray] = {}
        for index in sorted(facts):
            chunk = layout.chunks[index]
            reduced = reduce_chunk(
                codec,
                part_sizes(chunk),
                [store.get(blobs_of(ready)[index]) for ready in readies],
                [report.weight for report in roster.members],
                parameters=parameter_parts(layout, chunk),
                fields={"run": run, "round": roster.round, "chunk": index},
            )
            assert reduced.finite == facts[index].finite
            assert not reduced.finite or content_hash(reduced.payload) == facts[index].hash, f"chunk {index}"
            means[index] = reduced.payload
        finite = all(fact.finite for fact in facts.values())
        norm = 0.0
        for index in sorted(facts):
            norm += facts[index].square_norm

        def mean(index: int, out: torch.Tensor, means: dict[int, bytearray] = means) -> None:
            decode_chunk(codec, part_sizes(toy.layout.chunks[index]), means[index], out=out)

        toy.apply(
            SimpleNamespace(  # type: ignore[arg-type]
                round=roster.round,
                members=roster.members if finite else (),
                expected_next=roster.expected_next,
                mean_square_norm=norm if finite else 0.0,
                mean=mean,
            )
        )
        after[roster.round] = toy.digest
    return after


def blobs_of(ready: Any) -> list[str]:
    place = (ready.round, ready.blob_attempt, ready.replica, ready.blob_incarnation)
    return [keys.input_chunk(*place, index) for index in range(len(ready.chunks))]
