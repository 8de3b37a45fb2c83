"""Each rule of the round, taken out: a small change of the code, and the schedules that must not survive it.

A schedule begins at `seed`; a few are looked at, so that a change of the protocol needn't find the one by luck.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from composer_replication.collective.object_store import garbage, keys, roster
from composer_replication.collective.object_store import round as machine
from composer_replication.collective.object_store.events import Create, Fail, Fetched, Found, Missing
from composer_replication.collective.object_store.roster import Mode
from composer_replication.collective.object_store.wire import load
from tests.collective.object_store.simulation import CHUNKS, Chances, Replica, Simulation, make

Patch = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Mutation:
    """`rule` in the words of the table in docs/protocol.md; `breaks` takes it out while it is entered."""

    rule: str
    breaks: Patch
    seed: int = 0
    schedule: Callable[[int], Simulation] = make
    steps: int = 12_000


def _instead(owner: Any, name: str, make_new: Callable[[Any], Any]) -> Patch:
    """Put in the place of owner.name what `make_new` makes of it."""
    return lambda: mock.patch.object(owner, name, make_new(getattr(owner, name)))


def _overwritten(step: str) -> Patch:
    """Who writes last wins."""

    def new(create: Any) -> Any:
        def changed(self: Simulation, key: str, data: bytes, what: str) -> None:
            if what == step or (step == "ready" and "/ready/" in key) or (step == "mean" and "/mean/" in key):
                self.store.put(key, data)
            else:
                create(self, key, data, what)

        return changed

    return _instead(Simulation, "_create", new)


def _believed(step: str) -> Patch:
    """Whoever has created a pointer goes by what it wanted to write."""

    def new(advance: Any) -> Any:
        wanted: dict[int, bytes] = {}

        def changed(state: machine.State, event: Any, now: float) -> Any:
            who = state.job.replica
            after = {"ready": "own", "roster": "committed", "mean": "ruled"}[step]
            if state.phase == after and who in wanted and isinstance(event, Found):
                event = Found(wanted.pop(who))
            state, action = advance(state, event, now)
            if isinstance(action, Create):
                wanted.pop(who, None)
                if action.step == step:
                    wanted[who] = action.data
            return state, action

        return changed

    from tests.collective.object_store import simulation

    return _instead(simulation, "advance", new)


@contextmanager
def _contributed_anew() -> Iterator[None]:
    """Overwritten, by a restart that doesn't ask whether it has contributed already."""

    def changed(state: machine.State, event: Any, now: float) -> Any:
        return real(state, event if state.tries else Missing(), now)

    real = machine._after_own
    with _overwritten("ready")(), mock.patch.object(machine, "_after_own", changed):
        yield


def _abort_unsaid(round_: Any) -> Any:
    def changed(self: Simulation, replica: Any, job: Any) -> Any:
        steps = round_(self, replica, job)
        create = self._create

        class Silent(BaseException):
            pass

        def silent(key: str, data: bytes, step: str) -> None:
            if self.current == replica.id and step == "roster" and load(data, key)["kind"] == "abort":
                self._raise(job.plan.round, int(key.split("/")[2]))
                raise Silent
            create(key, data, step)

        while True:
            self._create = silent  # type: ignore[method-assign]
            try:
                next(steps)
            except StopIteration as end:
                return end.value
            except Silent:
                replica.writing = None
                return Fail("aborted", "deadline, said to nobody", None), []
            finally:
                self._create = create  # type: ignore[method-assign]
            yield

    return changed


def _roster_read_otherwise(change: Callable[[Any, machine.Job], Any]) -> Patch:
    """A replica goes by a roster that it changes for itself."""

    def new(enter: Any) -> Any:
        def changed(state: machine.State, data: bytes, now: float) -> Any:
            parse = machine.parse_roster
            with mock.patch.object(machine, "parse_roster", lambda *a, **k: change(parse(*a, **k), state.job)):
                return enter(state, data, now)

        return changed

    return _instead(machine, "_enter", new)


def _faster_otherwise(found: Any, job: machine.Job) -> Any:
    """Every other replica finds the other mode faster."""
    if found.kind != "roster" or not found.members or job.replica % 2:
        return found
    if found.mode == "direct":
        shards = min(len(found.members), CHUNKS)
        ids = [report.replica for report in found.members]
        return replace(found, mode="sharded", shards=shards, owners=tuple(ids[:shards]))
    return replace(found, mode="direct", shards=1, owners=found.owners[:1])


def _cut_otherwise(found: Any, job: machine.Job) -> Any:
    """Every other replica would rather have fewer shards."""
    if found.shards < 2 or job.replica % 2:
        return found
    return replace(found, shards=found.shards - 1, owners=found.owners[:-1])


def _without_majority(counter: Any) -> Any:
    class First(Counter[Any]):
        """The commonest state counts, however few have it."""

        def most_common(self, n: int | None = None) -> list[tuple[Any, int]]:
            return [(what, sum(self.values())) for what, _ in super().most_common(n)]

    return First


def _pointers_too(_: Any) -> Any:
    return lambda self, round: self._store.list(keys.round_prefix(round))


def _at_once(_: Any) -> Any:
    return lambda self, expected: max(self._present.values(), default=0)


def _roster_too(collect: Any) -> Any:
    def changed(self: garbage.Collector, found: Any) -> None:
        collect(self, found)
        self._store.delete([keys.roster(found.round, found.attempt)])

    return changed


def _applied_early(after_fetch: Any) -> Any:
    def changed(state: machine.State, event: Any, now: float) -> Any:
        return machine._finish(state) if isinstance(event, Fetched) else after_fetch(state, event, now)

    return changed


def _culprits_forgotten(following: Any) -> Any:
    return lambda state, culprits: following(state, {})


def _owners_only(_: Any) -> Any:
    return lambda state, shard, now: state.roster.mode == "direct" or state.roster.owners[shard] == state.job.replica


def _damage_unseen(is_right: Any) -> Any:
    return lambda self, content, fact: content not in (b"", b"damaged") or is_right(self, content, fact)


@dataclass
class Stopped(Simulation):
    """One of four is stopped at some step, as by SIGSTOP, and goes on in the middle of it when the others have gone so
    far without it that what it was working with has been collected."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.left = random.Random(self.seed + 3).randint(2, 60)  # turns until it is stopped

    def _turn(self, replica: Replica) -> None:
        if replica.id == self.seed % self.replicas:
            self.left -= 1
            if self.left == 0:
                replica.asleep_until = self.now + 6.0 * self.timing.timeout_seconds
                return
        super()._turn(replica)


def stopped(seed: int) -> Stopped:
    mode: Mode = "direct" if seed % 8 < 4 else "sharded"
    return Stopped(seed, 4, False, mode, 16, Chances(crash=0.0, pause=0.0, lose_record=0.0))


@dataclass
class Interrupted(Simulation):
    """Replicas are interrupted in the middle of creating a pointer: one goes on after a while, another is started anew,
    and what it was writing may arrive much later. And one, in a fleet that can spare it, never comes back."""

    often: int = 12  # at most
    spare: bool = False

    def _turn(self, replica: Replica) -> None:
        if not (replica.alive and replica.writing and self.often and self.random.random() < 0.4):
            super()._turn(replica)
            return
        self.often -= 1
        if self.spare and "/mean/" in replica.writing[0]:
            self.spare, replica.gone, replica.alive = False, True, False
        elif self.random.random() < 0.5:
            replica.asleep_until = self.now + self.random.random() * 12.0
        else:
            self.delayed.append((self.now + self.random.random() * 12.0, *replica.writing))
            self._down(replica)


def interrupted(seed: int) -> Interrupted:
    mode: Mode = "direct" if seed % 8 == 0 else "sharded"
    bits = 0.5 if mode == "sharded" else 0.0
    return Interrupted(seed, 3, True, mode, 4, Chances(crash=0.0, pause=0.001, lose_record=0.0, other_bits=bits))


def bereaved(seed: int) -> Interrupted:
    return Interrupted(seed, 5, False, "sharded", 4, Chances(crash=0.0, pause=0.0, lose_record=0.0), spare=True)


def damaged(seed: int) -> Simulation:
    return Simulation(seed, 4, False, "sharded", 3, Chances(crash=0.0, pause=0.0, damage=0.1))


def diverged(seed: int) -> Simulation:
    return Simulation(seed, 4, False, "sharded", 4, Chances(crash=0.01, pause=0.0, diverge=0.5, lose_record=0.0))


_any_base = _roster_read_otherwise(lambda found, job: replace(found, base=job.plan.base))
_for_ever = _instead(machine, "MAX_FETCHES", lambda most: 1_000_000_000 * most)

MUTATIONS = {
    # created once
    "ready overwritten": Mutation("`ready` is created once", _overwritten("ready"), schedule=interrupted),
    "contributed anew": Mutation("`ready` is created once", _contributed_anew, schedule=interrupted),
    "own ready believed": Mutation("`ready` is created once", _believed("ready"), schedule=interrupted, seed=20),
    "roster overwritten": Mutation(
        "the roster is created once", _overwritten("roster"), schedule=interrupted, steps=4_000
    ),
    "own roster believed": Mutation("the roster is created once", _believed("roster"), schedule=interrupted, seed=16),
    "mean overwritten": Mutation(
        "a shard's pointer is created once", _overwritten("mean"), schedule=interrupted, seed=4
    ),
    "own mean believed": Mutation("a shard's pointer is created once", _believed("mean"), schedule=interrupted, seed=4),
    "abort not written": Mutation(
        "the abort is written under the roster's key", _instead(Simulation, "_round", _abort_unsaid)
    ),
    # pointers stay, blobs go
    "roster collected": Mutation(
        "pointers are never deleted", _instead(garbage.Collector, "collect", _roster_too), steps=4_000
    ),
    "pointers collected": Mutation(
        "pointers are never deleted", _instead(garbage.Collector, "_left_behind", _pointers_too), schedule=stopped
    ),
    "blobs collected early": Mutation(
        "blobs stay until all", _instead(garbage.Collector, "floor", _at_once), steps=4_000
    ),
    "gone means not yet": Mutation("a blob that is gone means", _for_ever, schedule=stopped, steps=4_000),
    # what is agreed
    "mode chosen locally": Mutation(
        "the mode and the shards are the roster's", _roster_read_otherwise(_faster_otherwise)
    ),
    "shards cut locally": Mutation(
        "the mode and the shards are the roster's", _roster_read_otherwise(_cut_otherwise), seed=4
    ),
    "base not checked": Mutation("a roster from another state isn't followed", _any_base, schedule=diverged),
    # averaging and applying
    "read ahead unverified": Mutation(
        "only if it has its pointer's hash", _instead(Simulation, "_is_right", _damage_unseen), seed=2
    ),
    "applied early": Mutation(
        "nothing is applied before all shards", _instead(machine, "_after_fetch", _applied_early), seed=4
    ),
    "culprits forgotten": Mutation(
        "isn't in the next attempt",
        _instead(machine, "_next_attempt", _culprits_forgotten),
        schedule=damaged,
        steps=4_000,
    ),
    "no takeover": Mutation(
        "a dead owner's shard is taken over",
        _instead(machine, "_my_turn", _owners_only),
        schedule=bereaved,
        steps=4_000,
    ),
}

# Rules that no schedule breaks, as long as the others hold.
no_majority = _instead(roster, "Counter", _without_majority)
any_history = _roster_read_otherwise(lambda found, job: replace(found, prev=job.plan.prev))
