"""The round's state machine under a simulated store and clock: pauses, crashes, late writes, damaged blobs, differing
bits, restarts with and without a record, garbage collection. What takes long ends at any later moment, its reading done
at the beginning or at the end; contributions are read ahead of the roster. Everything but the tensors is the real code.

`Simulation(seed, …).run()` raises AssertionError when two replicas apply different things, a round is applied
twice or a contribution counts twice, one raises where another applies, or the fleet doesn't get to the end.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from composer_replication.collective.base import Report
from composer_replication.collective.object_store import history, keys
from composer_replication.collective.object_store import round as machine
from composer_replication.collective.object_store.entrants import Entrants
from composer_replication.collective.object_store.events import (
    Busy,
    Create,
    Done,
    Fail,
    Fetch,
    Fetched,
    Found,
    Job,
    Missing,
    Read,
    Reduce,
    Reduced,
    Sleep,
    Spoiled,
    Started,
    Timing,
    Unfetched,
    Upload,
    Uploaded,
    Woke,
    Written,
)
from composer_replication.collective.object_store.garbage import Collector
from composer_replication.collective.object_store.history import closed_roster, plan_at, stand
from composer_replication.collective.object_store.pointers import ChunkFact
from composer_replication.collective.object_store.roster import Mode, Policy, shard_chunks
from composer_replication.collective.object_store.round import advance, begin
from composer_replication.collective.object_store.wire import dump, load
from composer_replication.errors import ObjectExists, ObjectMissing, ReplicationError
from composer_replication.store import MemoryStore

RUN = "simulated"
CHUNKS = 3
TIMING = Timing(timeout_seconds=20.0, takeover_seconds=3.0, poll_seconds=0.1, max_poll_seconds=1.0)
LARGE = 8  # replicas: more of them get as much done in a second, and meet with as many faults in a round, as so many do
LARGE_TIMING = Timing(timeout_seconds=60.0, takeover_seconds=10.0, poll_seconds=2.0, max_poll_seconds=10.0)
EVERY = 2  # rounds between checkpoints


def digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def manifest(round: int, base: str) -> bytes:
    return dump({"round": round, "digest": base, "anchor": [[base, len(base)]], "momentum": []})


@contextlib.contextmanager
def _parsed_once() -> Iterator[None]:
    """All of a large fleet parse the same pointers, each for itself: what comes out is a function of the bytes."""
    with contextlib.ExitStack() as stack:
        for module, name in ((machine, "parse_ready"), (machine, "parse_roster"), (history, "parse_roster")):
            once = functools.lru_cache(maxsize=None)(getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, once))
        yield


@dataclass(frozen=True)
class Chances:
    """How often things go wrong, per opportunity."""

    crash: float = 0.004
    pause: float = 0.004
    late_write: float = 0.5  # of a crash in the middle of a write: it arrives later
    lose_record: float = 0.2  # of a restart
    damage: float = 0.0  # of an uploaded chunk
    other_bits: float = 0.0  # of an average
    diverge: float = 0.0  # of a record that is loaded
    busy: float = 0.4  # of something long when it is asked for
    read_ahead: float = 0.2  # of another's chunk, at a pause before the roster


@dataclass
class Replica:
    """One replica; what is below `record` is lost in a crash."""

    id: int
    record: tuple[int, str] | None = None  # round, digest
    incarnation: int = 0
    asleep_until: float = 0.0
    alive: bool = False
    gone: bool = False  # for good
    finished: bool = False
    life: Any = None  # what it is doing: a generator that yields when others may act
    writing: tuple[str, bytes] | None = None


@dataclass
class Simulation:
    seed: int
    replicas: int
    strict: bool
    mode: Mode = "sharded"
    rounds: int = 4
    chances: Chances = Chances()
    dead: int = 0  # so many are gone for good at some moment (skip only)
    joining: int = 0  # so many come in later, at some moment (skip only)
    # what is checked
    applied: dict[int, tuple[str, str]] = field(default_factory=dict)  # round -> what was applied, state after
    averaged: dict[str, tuple[int, str]] = field(default_factory=dict)  # contribution -> where
    holding: set[tuple[int, int]] = field(default_factory=set)  # (round, attempt) that someone applied
    raised: set[tuple[int, int]] = field(default_factory=set)  # (round, attempt) that someone raised on
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.share = min(1.0, LARGE / self.replicas)
        self.timing = TIMING if self.replicas <= LARGE else LARGE_TIMING
        self.now = 0.0
        self.store = MemoryStore()
        self.delayed: list[tuple[float, str, bytes]] = []
        self.policy = Policy(
            strict=self.strict,
            fleet=tuple(range(self.replicas)),
            min_replicas=self.replicas // 2 + 1,
            mode=self.mode,
        )
        self.all = [Replica(i) for i in range(self.replicas + self.joining)]
        for newcomer in self.all[self.replicas :]:
            newcomer.asleep_until = self.random.random() * 60.0
        self.trained = 0
        self.current = 0
        self._write_checkpoint(0, digest("start"))
        self.store.put_if_absent(keys.manifest(0), manifest(0, digest("start")))
        self.store.put_if_absent(keys.FLEET, dump({"nonce": RUN, "replicas": self.replicas}))

    # -- the world

    def run(self, stormy: int = 4_000, steps: int = 40_000) -> None:
        """`stormy` steps in which things go wrong, then calm: the fleet must get to the end. (In a large fleet, where a
        round takes as many steps as there are pairs of replicas, that many times both.)"""
        stormy, steps = (int(count / self.share**2) for count in (stormy, steps))
        with _parsed_once() if self.replicas > LARGE else contextlib.nullcontext():
            self._run(stormy, steps)

    def _run(self, stormy: int, steps: int) -> None:
        doomed = self.random.sample(self.all, self.dead)
        for step in range(steps):
            if step == stormy:
                self.chances = Chances(crash=0.0, pause=0.0, lose_record=0.0)
            if all(replica.finished or replica.gone for replica in self.all):
                self._check_end()
                return
            for replica in doomed:
                if not replica.gone and self.applied and self.random.random() < 0.01 * self.share**2:
                    replica.gone, replica.alive, replica.life = True, False, None
            self._deliver()
            able = [r for r in self.all if not r.gone and not r.finished and r.asleep_until <= self.now]
            if not able:
                self.now = min((r.asleep_until for r in self.all if not r.gone and not r.finished), default=self.now)
                continue
            self.now += self.random.random() * 0.02 * self.share
            self._turn(self.random.choice(able))
        raise AssertionError(f"wedged after {step + 1} steps: {self._where()}")

    def _where(self) -> str:
        return "; ".join(f"{r.id}: {r.record} alive {r.alive} gone {r.gone} finished {r.finished}" for r in self.all)

    def _deliver(self) -> None:
        for item in [item for item in self.delayed if item[0] <= self.now]:
            self.delayed.remove(item)
            self._create(item[1], item[2], item[1].split("/")[3].removesuffix(".json"))

    def _turn(self, replica: Replica) -> None:
        self.current = replica.id
        chance = self.random.random() / self.share**2
        if replica.alive and chance < self.chances.crash:
            if replica.writing is not None and self.random.random() < self.chances.late_write:
                self.delayed.append((self.now + self.random.random() * 40.0, *replica.writing))
            self._down(replica)
            return
        if replica.alive and chance < self.chances.crash + self.chances.pause:
            replica.asleep_until = self.now + self.random.random() * 3.0 * self.timing.timeout_seconds
            return
        if not replica.alive:
            replica.alive, replica.incarnation = True, replica.incarnation + 1
            replica.life = self._life(replica)
        try:
            next(replica.life)
        except StopIteration:
            if replica.alive:
                replica.finished = True
        except ReplicationError as error:
            self.failures.append(f"{replica.id}: {error}")
            replica.record = None  # joins again
            self._down(replica)

    def _down(self, replica: Replica) -> None:
        replica.alive, replica.life, replica.writing = False, None, None
        replica.asleep_until = self.now + self.random.random() * 5.0

    # -- a replica's life; each yield is a moment at which it may be interrupted

    def _life(self, replica: Replica):
        if replica.record is None or self.random.random() < self.chances.lose_record:
            recorded, (round, base) = False, self._newest_checkpoint()
        else:
            recorded, (round, base) = True, replica.record
        if not plan_at(self.store, RUN, round, base, self.policy.fleet, first=self.policy.first_round).expected:
            replica.record = (round, base)
            return  # it had recorded the end, or came after it
        if recorded and self.random.random() < self.chances.diverge:
            base = digest("nonsense", base, replica.incarnation)
        yield
        standing = stand(self.store, RUN, round, strict=self.strict)
        attempts, tip = dict(standing.attempts), standing.tip
        collector = Collector(self.store, replica.id, checkpoint=0, every=EVERY)
        if round and (before := closed_roster(self.store, RUN, round - 1)) is not None:
            collector.closed(before.roster)
        pending: tuple[int, str] | None = None
        entrants = Entrants(self.store, RUN, self.replicas)
        if replica.id >= self.replicas:
            entrants.announce(replica.id)
            yield
        catching_up, left = True, False
        while True:
            yield
            contribute = not catching_up and not left
            if contribute:
                yield from self._train(replica, round)
            job = self._job(replica, round, base, contribute, left or catching_up, attempts.get(round, 0), tip, left)
            job = replace(job, wait=left, policy=replace(self.policy, fleet=entrants.look()))
            result, blobs = yield from self._round(replica, job)
            collector.wrote(round, blobs)
            if isinstance(result, Fail):
                if result.kind == "aborted":
                    attempt = result.roster.attempt if result.roster else 0
                    self._raise(round, attempt)
                    self._down(replica)
                    yield
                    return
                if result.kind in ("diverged", "behind"):
                    replica.record = None
                    self._down(replica)
                    yield
                    return
                if result.kind == "sealed":
                    replica.gone = True
                    return
                raise AssertionError(f"replica {replica.id} failed: {result.kind} {result.reason}")
            if result.closed is None:
                catching_up = False
                continue
            closed = result.closed
            if pending is not None and pending == (closed.roster.round, closed.roster.base):
                self._create(keys.manifest(pending[0]), manifest(*pending), "manifest")
            base = self._apply(replica, closed, base)
            yield
            round += 1
            replica.record = (round, base)
            collector.closed(closed.roster)
            writers = closed.roster.present & set(closed.roster.expected_next)
            if round % EVERY == 0 and writers and min(writers) == replica.id:
                self._write_checkpoint(round, base)
                pending = (round, base)
            yield
            collector.collect(closed.roster)
            reports = (*closed.roster.members, *closed.roster.others)
            left = left or any(report.replica == replica.id and report.leaving for report in reports)
            if replica.id not in closed.roster.present and not left:
                catching_up = True
            if not closed.roster.expected_next:
                if all(self.all[other].record == (round, base) for other in closed.roster.present):
                    self._write_final(round, base)
                return

    def _write_final(self, round: int, base: str) -> None:
        """The last checkpoint, once all have ended alike: for whoever comes when the run is over."""
        self._write_checkpoint(round, base)
        with contextlib.suppress(ObjectExists):
            self.store.put_if_absent(keys.manifest(round), manifest(round, base))

    def _train(self, replica: Replica, round: int):
        until = self.now + self.random.random() * 5.0
        while self.now < until:
            replica.asleep_until = min(until, self.now + 1.0)
            yield
        self.trained += 1

    def _job(
        self,
        replica: Replica,
        round: int,
        base: str,
        contribute: bool,
        onlooking: bool,
        first: int,
        tip: int,
        left: bool,
    ) -> Job:
        plan = plan_at(self.store, RUN, round, base, self.policy.fleet, first=self.policy.first_round)
        report = Report(
            replica=replica.id,
            steps=10,
            tokens=None,
            mass=1.0,
            square_norm=1.0,
            finite=True,
            leaving=round >= self.rounds - 1,
            next_lr=0.1,
            preview=(),
            remaining=None,
            base=base,
            layout="layout",
            metrics={"trained": float(self.trained)},
        )
        return Job(
            plan=plan,
            policy=self.policy,
            timing=self.timing,
            replica=replica.id,
            incarnation=replica.incarnation,
            layout="layout",
            report=report if contribute else None,
            announce=not left and round >= tip - 1,
            first_attempt=first,
        )

    def _round(self, replica: Replica, job: Job):
        held: dict[int, ChunkFact] = {}
        blobs: list[str] = []
        begun: dict[tuple[Any, ...], Any] = {}  # what is long, and what came of it already
        ahead: dict[tuple[int, int], bytes] = {}  # chunks of contributions, read before the roster
        state, action = advance(begin(job), Started(), self.now)
        while not isinstance(action, Done | Fail):
            if isinstance(action, Create):
                replica.writing = (action.key, action.data)
            if isinstance(action, Sleep):
                replica.asleep_until = self.now + action.seconds
            yield
            self.current = replica.id
            event = self._take_time(replica, job, state, action, held, blobs, begun, ahead)
            replica.writing = None
            state, action = advance(state, event, self.now)
        return action, blobs

    def _create(self, key: str, data: bytes, step: str) -> None:
        with contextlib.suppress(ObjectExists):
            self.store.put_if_absent(key, data)

    def _take_time(
        self,
        replica: Replica,
        job: Job,
        state: machine.State,
        action: Any,
        held: dict[int, ChunkFact],
        blobs: list[str],
        begun: dict[tuple[Any, ...], Any],
        ahead: dict[tuple[int, int], bytes],
    ):
        if isinstance(action, Sleep | Upload) and state.roster is None:
            self._read_ahead(replica, job, state.attempt, ahead)
        if not isinstance(action, Upload | Reduce | Fetch):
            return self._act(replica, job, state, action, held, blobs, ahead)
        name = (type(action).__name__, state.attempt, state.shard if state.roster is not None else 0)
        if name not in begun and self.random.random() < 0.5:
            begun[name] = self._act(replica, job, state, action, held, blobs, ahead)
        if self.random.random() < self.chances.busy:
            return Busy()
        if name in begun:
            return begun.pop(name)
        return self._act(replica, job, state, action, held, blobs, ahead)

    def _read_ahead(self, replica: Replica, job: Job, attempt: int, ahead: dict[tuple[int, int], bytes]) -> None:
        """From whichever of its incarnations: a guess may be of a process that is gone."""
        others = self.all if self.replicas <= LARGE else self.random.sample(self.all, LARGE)
        for other in others:
            for index in range(CHUNKS):
                if other.id != replica.id and other.incarnation and self.random.random() < self.chances.read_ahead:
                    incarnation = self.random.randint(max(1, other.incarnation - 1), other.incarnation)
                    key = keys.input_chunk(job.plan.round, attempt, other.id, incarnation, index)
                    try:
                        ahead.setdefault((other.id, index), self.store.get(key))
                    except ObjectMissing:
                        continue

    def _act(
        self,
        replica: Replica,
        job: Job,
        state: machine.State,
        action: Any,
        held: dict[int, ChunkFact],
        blobs: list[str],
        ahead: dict[tuple[int, int], bytes],
    ):
        match action:
            case Read(key):
                try:
                    return Found(self.store.get(key))
                except ObjectMissing:
                    return Missing()
            case Create(key, data, step):
                self._create(key, data, step)
                return Written()
            case Upload(attempt):
                facts = []
                for index in range(CHUNKS):
                    content = json.dumps([replica.id, job.report.metrics["trained"], index]).encode()
                    fact = ChunkFact(hashlib.sha256(content).hexdigest(), len(content))
                    key = keys.input_chunk(job.plan.round, attempt, replica.id, replica.incarnation, index)
                    damaged = self.random.random() < self.chances.damage
                    self.store.put(key, b"damaged" if damaged else content)
                    blobs.append(key)
                    facts.append(fact)
                return Uploaded(tuple(facts))
            case Reduce():
                return self._reduce(job, action, held, blobs, ahead)
            case Fetch():
                return self._fetch(job, action, held)
            case Sleep():
                return Woke()
        raise AssertionError(action)

    def _reduce(
        self,
        job: Job,
        action: Reduce,
        held: dict[int, ChunkFact],
        blobs: list[str],
        ahead: dict[tuple[int, int], bytes],
    ):
        facts = []
        for index in shard_chunks(action.roster, action.shard, CHUNKS):
            values = []
            for ready in action.readies:
                key = keys.input_chunk(job.plan.round, ready.blob_attempt, ready.replica, ready.blob_incarnation, index)
                content = ahead.get((ready.replica, index), b"")
                if not self._is_right(content, ready.chunks[index]):
                    try:
                        content = self.store.get(key)
                    except ObjectMissing as error:
                        return Spoiled(ready.replica, str(error), True)
                    if not self._is_right(content, ready.chunks[index]):
                        return Spoiled(ready.replica, f"{key} is damaged")
                value = json.loads(content)
                what = (ready.replica, ready.report.metrics["trained"], index)
                assert tuple(value) == what, f"{value} is averaged where {what} was declared"
                values.append(value)
            bits = self.random.random() if self.random.random() < self.chances.other_bits else 0
            content = json.dumps([values, bits]).encode()
            fact = ChunkFact(hashlib.sha256(content).hexdigest(), len(content))
            if action.roster.mode == "sharded":
                key = keys.output_chunk(job.plan.round, action.attempt, fact.hash)
                self.store.put(key, content)
                blobs.append(key)
            held[index] = fact
            facts.append(fact)
        return Reduced(tuple(facts))

    def _is_right(self, content: bytes, fact: ChunkFact) -> bool:
        return hashlib.sha256(content).hexdigest() == fact.hash

    def _fetch(self, job: Job, action: Fetch, held: dict[int, ChunkFact]):
        indices = shard_chunks(action.roster, action.verdict.shard, CHUNKS)
        if len(indices) != len(action.verdict.chunks):
            return Unfetched("another number of chunks", gone=False)
        for index, fact in zip(indices, action.verdict.chunks, strict=True):
            if held.get(index) == fact:
                continue
            if action.roster.mode == "direct":
                return Unfetched("not here", True) if index not in held else Unfetched("other bits", False, True)
            try:
                self.store.get(keys.output_chunk(job.plan.round, action.attempt, fact.hash))
            except ObjectMissing as error:
                return Unfetched(str(error), gone=True)
            held[index] = fact
        return Fetched()

    # -- what must hold

    def _apply(self, replica: Replica, closed: machine.Closed, base: str) -> str:
        roster = closed.roster
        mean = digest([fact.hash for fact in closed.chunks], [report.replica for report in roster.members])
        after = digest(base, mean)
        known = self.applied.setdefault(roster.round, (mean, after))
        assert known == (mean, after), f"round {roster.round}: replica {replica.id} applies something else"
        for report in roster.members:
            name = f"{report.replica}:{report.metrics['trained']}"
            place = (roster.round, mean)
            assert self.averaged.setdefault(name, place) == place, f"contribution {name} counts twice"
            assert report.base == base, "a contribution from another state was averaged"
        self.holding.add((roster.round, closed.attempt))
        assert not (self.holding & self.raised), f"one raises, another applies: {self.holding & self.raised}"
        return after

    def _raise(self, round: int, attempt: int) -> None:
        self.raised.add((round, attempt))
        assert not (self.holding & self.raised), f"one raises, another applies: {self.holding & self.raised}"

    def _check_end(self) -> None:
        ends = {replica.record for replica in self.all if replica.finished}
        assert len(ends) == 1, f"the replicas end in different states: {ends}"
        (end,) = ends
        assert end is not None and end[0] >= self.rounds, f"the run ended at {end}"

    # -- checkpoints

    def _write_checkpoint(self, round: int, base: str) -> None:
        self.store.put(keys.checkpoint_blob(round, base), base.encode())

    def _newest_checkpoint(self) -> tuple[int, str]:
        rounds = [keys.manifest_round(key) for key in self.store.list(keys.CHECKPOINTS)]
        newest = max(round for round in rounds if round is not None)
        base = load(self.store.get(keys.manifest(newest)), "manifest")["digest"]
        assert self.store.get(keys.checkpoint_blob(newest, base)) == base.encode()
        return newest, base


def make(seed: int, *, replicas: int = 0) -> Simulation:
    """A schedule of its own for each seed: size (unless given), policy and what goes wrong all vary."""
    choose = random.Random(seed * 7919 + 1)
    strict = choose.random() < 0.5
    mode: Mode = choose.choice(("direct", "sharded"))
    chosen = choose.choice((1, 2, 2, 3, 3, 3, 4, 4, 5, 6, 8))
    replicas = replicas or chosen
    chances = Chances(
        crash=choose.choice((0.0, 0.002, 0.01)),
        pause=choose.choice((0.0, 0.002, 0.01)),
        damage=0.0 if strict else choose.choice((0.0, 0.0, 0.02)),
        # (Direct reading needs equal arithmetic, which the numerics probe asks for: a replica whose bits differ stops.)
        other_bits=choose.choice((0.0, 0.5)) if mode == "sharded" else 0.0,
        diverge=choose.choice((0.0, 0.0, 0.1)),
    )
    dead = 0 if strict else choose.randint(0, (replicas - 1) // 2)
    rounds = choose.randint(2, 5)
    joining = 0 if strict else choose.choice((0, 0, 1, 1, 2, 3))
    return Simulation(seed, replicas, strict, mode, rounds, chances, dead, joining)


def large(seed: int, replicas: int = 64) -> Simulation:
    """Two rounds of a large fleet."""
    schedule = make(seed, replicas=replicas)
    schedule.rounds = 2
    return schedule
