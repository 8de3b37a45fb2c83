"""Every fault that the suite injects: where, under which policy, over which store. Data: the tests are parametrized
from it, and `docs/reliability.md` is written from it and from what a run of those tests gave (tests/faults/report.py).

Invariant: a test counts in the table only under a row that stands here, and a row without a test is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from composer_replication.collective.object_store.collective import STEPS

__all__ = ["FAULTS", "Case", "Fault", "Row", "counts", "covers", "rows"]

T = TypeVar("T")

STRICT, SKIP, BOTH = ("strict",), ("skip",), ("strict", "skip")
FILES, S3, MEMORY = ("files",), ("s3",), ("memory",)


@dataclass(frozen=True)
class Case:
    """One run of a fault: what a test is parametrized with."""

    policy: str
    store: str
    point: Any = ""
    slow: bool = True

    def __str__(self) -> str:
        parts = self.point if isinstance(self.point, tuple) else (self.point,)
        return "-".join(str(part) for part in (self.policy, self.store, *parts) if part != "")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Its tests are made from `cases`; those that are parametrized in their own way have `policies` and `stores`."""

    what: str
    where: str
    outcome: str  # what must come of it, beyond what must hold after every fault
    cases: tuple[Case, ...] = ()
    policies: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()

    def columns(self) -> list[tuple[str, str]]:
        """(policy, store), in the order of the table."""
        given = [(policy, store) for policy in self.policies for store in self.stores]
        return list(dict.fromkeys([*((case.policy, case.store) for case in self.cases), *given]))


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    fault: str
    policy: str
    store: str


def every(policies: Iterable[str], stores: Iterable[str], points: Iterable[Any] = ("",)) -> tuple[Case, ...]:
    points = tuple(points)
    return tuple(Case(policy, store, point) for policy in policies for store in stores for point in points)


def quick(cases: Iterable[Case], *picked: Any) -> tuple[Case, ...]:
    """The same cases; those at the picked points (all, if none is named) run with the quick tests."""
    return tuple(Case(c.policy, c.store, c.point, bool(picked) and c.point not in picked) for c in cases)


def in_turn(steps: Iterable[str], others: Iterable[T]) -> list[tuple[str, T]]:
    """Each step with one of the others."""
    pool = tuple(others)
    return [(step, pool[number % len(pool)]) for number, step in enumerate(steps)]


# -- the steps of the protocol, and who takes them

_BY_LOWEST = {"fleet", "checkpoint", "manifest"}
_AT_START = {"claim", "fleet"}
_OF_LIVES = {"late"}  # taken by those alone that the fleet went on without
POINTS = [f"{when}:{step}" for step in (*STEPS, "record") if step not in _OF_LIVES for when in ("before", "after")]
MODES = ("direct", "sharded")
ROUND_STEPS = [point for point in POINTS if point.partition(":")[2] not in _AT_START | _BY_LOWEST]
_PUBLISHING = ("upload", "ready", "roster", "reduce", "mean", "fetch")
PUBLISH = [f"{when}:{step}" for step in _PUBLISHING for when in ("before", "after")]
PAUSES = in_turn((point for point in ROUND_STEPS if not point.endswith(":final")), (2, 0, 1))


def _roles(step: str) -> tuple[int, ...]:
    """The first, a middle and the last replica; some steps are the first one's alone."""
    return (0,) if step.partition(":")[2] in _BY_LOWEST else (0, 1, 2)


def _restarts() -> Iterator[tuple[str, int, str]]:
    """Every step, every role; both ways for the tensors with the first, in turn with the others."""
    for number, step in enumerate(POINTS):
        for role in _roles(step):
            for mode in MODES if role == 0 else (MODES[(number + role) % 2],):
                yield step, role, mode


def _restarts_in_turn() -> Iterator[tuple[str, int, str]]:
    for number, step in enumerate(POINTS):
        roles = _roles(step)
        yield step, roles[number % len(roles)], MODES[number // 2 % 2]


_QUICK_RESTARTS = (
    ("after:claim", 1, "sharded"), ("before:manifest", 0, "direct"), ("after:upload", 0, "sharded"),
    ("after:ready", 2, "sharded"), ("after:roster", 0, "sharded"), ("before:mean", 2, "direct"),
    ("before:record", 0, "direct"), ("after:record", 2, "sharded"),
)  # fmt: skip

# -- what arrives late

_ARRIVALS = ("before the restart", "after the restart's own")
LATE = [(w, a, n % 3) for n, w in enumerate(("input", "ready", "roster", "output", "mean")) for a in _ARRIVALS]

# -- the network

NETWORK = (
    "delayed", "throttled (429)", "throttled (503)", "failing (500)", "refused", "request cut midway",
    "answer cut midway", "answer lost", "listing stale",
)  # fmt: skip

# -- what lies in a store

OBJECTS = (
    "claim", "fleet", "member", "layout", "input", "ready", "roster", "mean", "output", "checkpoint", "manifest",
    "result",
)  # fmt: skip
_UNREAD = ("claim", "member", "layout")  # in a fleet that is well nobody reads them


def _flips(*places: float) -> list[tuple[str, str, float]]:
    """Each object, as it is written and while it lies there, at these parts of its length."""
    written = [(what, "as it is written", place) for what in OBJECTS for place in places]
    return [*written, *((what, "lying there", place) for what in OBJECTS if what not in _UNREAD for place in places)]


_PARTS = ("weights", "momentum", "controller")
DIVERGENCES = [(part, after, (2, 0)[(n + after) % 2]) for n, part in enumerate(_PARTS) for after in range(4)]

FAULTS: dict[str, Fault] = {
    "killed, restarted": Fault(
        what="kill -9, restarted with its record",
        where="before and after every step, every role",
        outcome="the bits of an undisturbed run",
        cases=(
            *quick(every(STRICT, FILES, _restarts()), *_QUICK_RESTARTS),
            *every(STRICT, S3, _restarts_in_turn()),
        ),
    ),
    "killed, not restarted": Fault(
        what="kill -9, never restarted",
        where="before and after every step, every role",
        outcome="the others end without it, alike",
        cases=(
            *quick(
                every(SKIP, FILES, [(step, role) for step in ROUND_STEPS for role in (0, 1, 2)]),
                ("after:upload", 1),
                ("after:ready", 0),
                ("before:mean", 2),
                ("before:record", 1),
            ),
            *every(SKIP, S3, in_turn(ROUND_STEPS, (0, 1, 2))),
        ),
    ),
    "paused, woken": Fault(
        what="hangs at a step until the others have given up or ended, then goes on",
        where="before and after every step, roles in turn",
        outcome="the same bits, or an error; a strict fleet that is restarted ends",
        cases=quick(every(BOTH, MEMORY, PAUSES), PAUSES[2], PAUSES[9]),
    ),
    "stopped, woken": Fault(
        what="SIGSTOP until the run is over and the round's blobs are collected, then SIGCONT",
        where="before and after every step, roles in turn",
        outcome="the others' bits, or an error that says that it is behind",
        cases=every(SKIP, FILES, PAUSES),
    ),
    "one id, two processes": Fault(
        what="SIGSTOP, its id taken over by another machine that trains otherwise, SIGCONT at the end",
        where="before and after every step that publishes, roles in turn",
        outcome="the stopped one is fenced; nothing is overwritten",
        cases=quick(every(STRICT, FILES, in_turn(PUBLISH, (2, 0, 1))), ("after:ready", 2)),
    ),
    "another contribution": Fault(
        what="killed; the interval, trained again, comes out otherwise",
        where="before and after every step that publishes, roles in turn",
        outcome="what the store holds counts, once",
        cases=(
            *quick(every(BOTH, MEMORY, in_turn(PUBLISH, (1, 2, 0))), ("after:upload", 2), ("after:ready", 1)),
            *every(STRICT, S3, in_turn(PUBLISH, (1, 2, 0))),
        ),
    ),
    "late write": Fault(
        what="a write of a killed process arrives when that is dead, and restarted with another contribution",
        where="each kind of object of a round; before the restart, or after its own",
        outcome="the first to arrive counts, once",
        cases=(
            *quick(every(BOTH, MEMORY, LATE), LATE[2], LATE[3]),
            *every(STRICT, S3, LATE),
        ),
    ),
    "bad network": Fault(
        what="one request of four is delayed, throttled, refused, cut, unheard, or sees old listings",
        where="a proxy before the store, all along; one replica is killed and restarted meanwhile",
        outcome="nothing is noticed but the time",
        cases=(
            *quick(every(STRICT, S3, NETWORK), "answer lost"),
            *every(SKIP, S3, NETWORK[1::2]),
            *every(STRICT, ("gcs",), NETWORK[1::2]),
            *every(STRICT, ("azure",), ("throttled (429)", "request cut midway")),
        ),
    ),
    "away for a minute": Fault(
        what="the store can't be reached for a minute",
        where="from a step of a round on",
        outcome="nothing is noticed but the time",
        cases=every(BOTH, S3, ("before:upload", "after:roster", "before:fetch")),
    ),
    "away for an hour": Fault(
        what="the store can't be reached for longer than is tried again",
        where="from a step of a round on",
        outcome="all stop and say so; the restarted fleet ends",
        cases=every(BOTH, S3, ("before:mean",)),
    ),
    "diverged": Fault(
        what="weights, momentum or controller change in memory",
        where="after each round, the last one too; in the checkpoint's writer and in another",
        outcome="never averaged, never joined from; a run that ends so isn't closed",
        cases=quick(every(BOTH, MEMORY, DIVERGENCES), ("momentum", 1, 2), ("controller", 3, 0)),
    ),
    "orders at the deadline": Fault(
        what="the last contribution and the deadline meet, in every order of the requests",
        where="in a fleet of two and of three",
        outcome="all apply, or all raise the same",
        cases=quick(every(STRICT, MEMORY, (2, 3))),
    ),
    "corrupt after commit": Fault(
        what="a contribution is damaged",
        where="when the roster that names it is there",
        outcome="used everywhere or nowhere; strict: all raise and name it, and the next attempt goes through; a "
        "direct round that some had read already goes on without who hadn't, which stops and names it",
        cases=quick(every(BOTH, MEMORY, MODES)),
    ),
    "sum overflows": Fault(
        what="finite contributions whose sum isn't",
        where="in each codec, direct and sharded",
        outcome="no outer step in that round, the state stays finite",
        cases=quick(
            every(BOTH, MEMORY, [(c, m) for c in ("float32", "bfloat16", "int8") for m in MODES]), ("int8", "sharded")
        ),
    ),
    "nobody finite": Fault(
        what="NaN on all replicas",
        where="in one round",
        outcome="an empty roster, no outer step, nothing written that isn't finite",
        cases=quick(every(BOTH, MEMORY)),
    ),
    "rare checkpoints": Fault(
        what="checkpoints rarer than rounds are collected, and a record lost",
        where="at a round far from the last checkpoint",
        outcome="it joins through all rounds since",
        cases=quick(every(BOTH, MEMORY)),
    ),
    "all at once": Fault(
        what="one comes back without its record, one leaves, one is late",
        where="in the same round",
        outcome="all end alike",
        cases=quick(every(SKIP, MEMORY)),
    ),
    "all fresh": Fault(
        what="the whole fleet is killed and comes back without its records",
        where="in the middle of the run",
        outcome="it goes on from its checkpoint",
        cases=quick(every(BOTH, MEMORY)),
    ),
    "alone": Fault(
        what="the first replica is alone, twice for longer than it waits",
        where="at the start",
        outcome="no round is closed without the others",
        cases=quick(every(BOTH, MEMORY)),
    ),
    "folder gone": Fault(
        what="the folder of one replica is unmounted",
        where="before and after steps of a round",
        outcome="it stops and says so; nothing is written into the empty place",
        cases=quick(every(BOTH, FILES, ("before:upload", "after:ready", "before:fetch")), "after:ready"),
    ),
    "file size limit": Fault(
        what="a replica may write no large file (RLIMIT_FSIZE)",
        where="when it comes back to a round",
        outcome="it says so; the others go by their policy",
        cases=quick(every(BOTH, FILES, MODES), "sharded"),
    ),
    "disk full": Fault(
        what="the store's disk is full (a memory disk of 8 MB)",
        where="at steps of a round",
        outcome="all stop and say so; with room again, the restarted fleet ends",
        cases=quick(every(BOTH, FILES, ("before:upload", "before:mean")), "before:upload"),
    ),
    "two runs, one prefix": Fault(
        what="a second run is started under the prefix of a first",
        where="while that one runs, and when it has ended; named by their launcher, or not",
        outcome="the second is refused with the remedy, and changes nothing",
        cases=quick(every(BOTH, MEMORY, ("named", "not named"))),
    ),
    "encoder off by one": Fault(
        what="means come out otherwise by one unit from one replica to the next",
        where="owners hang before they publish, others take over",
        outcome="the published one counts, for its owner too",
        cases=quick(every(BOTH, MEMORY, (0, 1, 2))),
    ),
    "mixed fleet": Fault(
        what="three instruction sets (default, AVX2, the machine's own), with 1, 3 and 4 threads",
        where="one on each replica",
        outcome="the same bits",
        cases=quick(
            every(STRICT, FILES, [("float32", "direct"), ("bfloat16", "sharded"), ("int8", "sharded")]),
            ("int8", "sharded"),
        ),
    ),
    "two versions of PyTorch": Fault(
        what="another version of PyTorch (named by OTHER_PYTHON)",
        where="on one replica",
        outcome="the same bits, or refused by the numerics probe",
        cases=every(STRICT, FILES),
    ),
    "flipped bit": Fault(
        what="a bit turns over",
        where="in every kind of object; as it is written, or while it lies there",
        outcome="the right bits, or an error that names the object",
        cases=(
            *quick(every(BOTH, MEMORY, _flips(0.5)), ("input", "as it is written", 0.5)),
            *every(SKIP, FILES, _flips(0.3)),
            *every(STRICT, S3, _flips(0.7)),
        ),
    ),
}


def covers(fault: str) -> Callable[[T], T]:
    """Decorates a test with an argument `case`: it runs for each case of the fault, and counts in the table."""
    params = [
        pytest.param(
            case,
            id=str(case),
            marks=[pytest.mark.fault(fault, case.policy, case.store), *([pytest.mark.slow] if case.slow else [])],
        )
        for case in FAULTS[fault].cases
    ]
    return pytest.mark.parametrize("case", params)


def counts(fault: str, policy: str = "", store: str = "memory") -> pytest.MarkDecorator:
    """Decorates a test that is parametrized in its own way. Without a policy, that is the test's argument `policy`."""
    return pytest.mark.fault(fault, policy, store)


def rows() -> list[Row]:
    return [Row(name, policy, store) for name, fault in FAULTS.items() for policy, store in fault.columns()]
