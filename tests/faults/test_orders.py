"""Every order in which the last contribution and the deadline of a strict round can meet: all apply, or all raise."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from composer_replication.collective.base import Report
from composer_replication.collective.object_store import keys
from composer_replication.collective.object_store.events import (
    Action,
    Create,
    Event,
    Fail,
    Found,
    Job,
    Missing,
    Read,
    Sleep,
    Started,
    Timing,
    Upload,
    Uploaded,
    Woke,
    Written,
)
from composer_replication.collective.object_store.pointers import ChunkFact
from composer_replication.collective.object_store.roster import Plan, Policy
from composer_replication.collective.object_store.round import State, advance, begin
from tests.faults.registry import Case, covers

TIMEOUT_SECONDS = 20.0
Objects = dict[str, bytes]


@dataclass(frozen=True)
class Replica:
    """Between two of its requests; `now` is what its clock says."""

    state: State
    action: Action
    now: float

    @property
    def ended(self) -> str:
        if isinstance(self.action, Fail):
            return f"{self.action.kind}: {self.action.reason}"
        roster = self.state.roster
        return "" if roster is None else f"applies {[report.replica for report in roster.members]}"


def job(replica: int, replicas: int) -> Job:
    fleet = tuple(range(replicas))
    report = Report(
        replica=replica, steps=10, tokens=None, mass=1.0, square_norm=1.0, finite=True, leaving=False, next_lr=0.1,
        preview=(), remaining=None, base="base", layout="layout",
    )  # fmt: skip
    return Job(
        plan=Plan(run="run", round=1, prev="before", base="base", expected=fleet),
        policy=Policy(strict=True, fleet=fleet, min_replicas=replicas),
        timing=Timing(timeout_seconds=TIMEOUT_SECONDS, takeover_seconds=5.0, poll_seconds=0.1, max_poll_seconds=1.0),
        replica=replica,
        incarnation=1,
        layout="layout",
        report=report,
    )


def act(replica: Replica, objects: Objects) -> tuple[Replica, Objects]:
    """One request, and what the machine makes of its answer."""
    event: Event
    match replica.action:
        case Read(key):
            event = Found(objects[key]) if key in objects else Missing()
        case Create(key, data, _):
            objects, event = {key: data, **objects}, Written()
        case Upload():
            event = Uploaded((ChunkFact("ab" * 8, 9),))
        case Sleep():
            event = Woke()
        case other:
            raise AssertionError(other)
    state, action = advance(replica.state, event, replica.now)
    return replace(replica, state=state, action=action), objects


def started(replica: int, replicas: int, now: float) -> Replica:
    state, action = advance(begin(job(replica, replicas)), Started(), now)
    return Replica(state, action, now)


@covers("orders at the deadline")
def test_every_order_around_a_strict_deadline(case: Case) -> None:
    replicas: int = case.point
    objects: Objects = {}
    waiting: list[Replica] = []
    for index in range(replicas - 1):  # they have declared themselves, and wait
        one = started(index, replicas, 0.0)
        while not isinstance(one.action, Sleep):
            one, objects = act(one, objects)
        waiting.append(replace(one, now=TIMEOUT_SECONDS + 1.0))  # and when they wake, their time is up
    last = started(replicas - 1, replicas, 100.0)  # by a clock of its own
    seen: set[str] = set()
    ends: set[tuple[str, ...]] = set()
    open_: list[tuple[tuple[Replica, ...], Objects]] = [((*waiting, last), objects)]
    while open_:
        fleet, objects = open_.pop()
        name = hashlib.sha256(repr((fleet, sorted(objects.items()))).encode()).hexdigest()
        if name in seen:
            continue
        seen.add(name)
        if all(replica.ended for replica in fleet):
            ends.add(tuple(replica.ended for replica in fleet))
            continue
        for index, replica in enumerate(fleet):
            if not replica.ended:
                moved, after = act(replica, objects)
                open_.append(((*fleet[:index], moved, *fleet[index + 1 :]), after))
    assert all(len(set(end)) == 1 for end in ends), ends
    told = {end[0] for end in ends}
    assert told == {f"applies {list(range(replicas))}", "aborted: too few replicas were ready in time"}, told
    assert len(seen) > 50 and keys.roster(1, 0) in objects
