"""Where the threads of an `InProcessFleet` meet: what they have handed in, and waiting for one another.

Invariant: once `failure` is set, nobody waits any longer: each thread that isn't through raises its own copy of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from composer_replication.collective.agreement import Closing, Offer, check_offers, close_round, without_mean
from composer_replication.collective.base import Report, Snapshot
from composer_replication.collective.guards import Guards
from composer_replication.collective.layout import Layout
from composer_replication.collective.reduce import parameter_parts, part_sizes, reduce_chunk
from composer_replication.errors import FleetError, RoundAborted, RoundError, RoundTimeout

__all__ = ["Meeting", "MeetingRound"]


@dataclass
class MeetingRound:
    """One round, from the first report to the last mean."""

    reports: dict[int, Report] = field(default_factory=dict[int, Report])
    layouts: dict[int, Layout] = field(default_factory=dict[int, Layout])
    closing: Closing | None = None
    layout: Layout | None = None
    waiting: dict[int, bytearray] = field(default_factory=dict[int, bytearray])  # encoded, of one chunk, by replica
    means: list[bytearray] = field(default_factory=list[bytearray])
    square_norm: float = 0.0

    @property
    def decided(self) -> bool:
        if self.closing is None or self.layout is None:
            return False
        return not self.closing.members or len(self.means) == len(self.layout.chunks)


class Meeting:
    """State shared by the collectives of one process. Everything but `reduce` is called with `condition` held."""

    def __init__(self, ids: tuple[int, ...], codec: str, timeout_seconds: float, guards: Guards) -> None:
        self.ids = ids
        self.codec = codec
        self.guards = guards
        self.timeout_seconds = timeout_seconds
        self.condition = threading.Condition()
        self.failure: Callable[[], Exception] | None = None
        self.offers: dict[int, Offer] = {}
        self.snapshots: dict[int, Snapshot] = {}
        self.source: int | None = None  # whose state all begin with, once that is decided
        self.shared: Snapshot | None = None  # that state, until everybody has it
        self.rounds: dict[int, MeetingRound] = {}
        self.open = 0  # the first round that isn't closed
        self.expected = ids  # in that round
        self.asked: dict[int, int] = dict.fromkeys(ids, 0)  # the last round that each open collective asked for
        self.status: dict[int, dict[str, Any]] = {}
        self.results: dict[int, tuple[str, dict[str, Any]]] = {}

    def fail(self, make: Callable[[], Exception]) -> None:
        """End the run for all: the first failure is the one that everybody raises."""
        if self.failure is None:
            self.failure = make
        self.condition.notify_all()

    def abort(self, reason: str) -> None:
        self.fail(lambda: RoundAborted(reason))

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure()

    def wait(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Wait until `ready`. Raises the failure, or RoundTimeout (for all), if that doesn't come about."""
        if not self.condition.wait_for(lambda: ready() or self.failure is not None, self.timeout_seconds):
            text = f"waited {self.timeout_seconds:g} s for {what()}"
            self.fail(lambda: RoundTimeout(text))
        if not ready():
            self.check()

    def missing(self, wanted: Collection[int], there: Collection[int]) -> str:
        absent = [str(i) for i in wanted if i not in there]
        return f"replica{'s' if len(absent) > 1 else ''} {', '.join(absent)}"

    def begin(self) -> None:
        """All offers are in: choose the state that all begin with."""
        try:
            source = check_offers(list(self.offers.values()))
        except (FleetError, RoundError) as error:
            self.fail(_again(error))
            return
        self.shared = self.snapshots[source]
        self.open = self.shared.round
        self.asked = dict.fromkeys(self.asked, self.open)
        self.source = source
        self.condition.notify_all()

    def close(self, number: int, entry: MeetingRound) -> None:
        """All reports of a round are in: decide who is averaged."""
        try:
            entry.closing = close_round(list(entry.reports.values()), entry.layouts, self.guards)
        except (FleetError, RoundError) as error:
            self.fail(_again(error))
            return
        entry.layout = entry.layouts[min(entry.layouts)]
        self.expected, self.open = entry.closing.expected_next, number + 1
        self.condition.notify_all()

    def forget(self) -> None:
        """Drop the rounds that every open collective has behind it."""
        oldest = min(self.asked.values(), default=self.open)
        for number in [n for n in self.rounds if n < oldest]:
            del self.rounds[number]

    def reduce(self, entry: MeetingRound, index: int) -> None:
        """All contributions to chunk `index` are in: average them."""
        closing, layout = entry.closing, entry.layout
        assert closing is not None and layout is not None, "chunks come after the round has closed"
        chunk = layout.chunks[index]
        reduced = reduce_chunk(
            self.codec,
            part_sizes(chunk),
            (entry.waiting[report.replica] for report in closing.members),
            [report.weight for report in closing.members],
            scales=closing.treatment.scales,
            trim=self.guards.trim(len(closing.members)),
            parameters=parameter_parts(layout, chunk),
        )
        with self.condition:
            if reduced.finite:
                entry.means.append(reduced.payload)
                entry.square_norm += reduced.square_norm
            else:
                entry.closing, entry.means, entry.square_norm = without_mean(closing), [], 0.0
            entry.waiting.clear()
            self.condition.notify_all()


def _again(error: Exception) -> Callable[[], Exception]:
    """The same error, made anew for each thread that raises it."""
    kind, text = type(error), str(error)
    return lambda: kind(text)
