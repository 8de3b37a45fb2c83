"""A fleet of threads in one process: for notebooks, simulators and tests.

Invariant: contributions are encoded, added in roster order, encoded again and decoded exactly as between machines,
so that the same contributions give the same bits as through a store.

    fleet = InProcessFleet(4, codec="int8")
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(train_one_replica, fleet.collectives()))

The fleet is fixed and strict: a replica that gives up, or keeps the others waiting too long, ends the run for all of
them, each with an error that says who and why.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from composer_replication.collective.agreement import Offer
from composer_replication.collective.base import Contribution, RoundOutcome, Snapshot
from composer_replication.collective.codec import check_codec, decode_chunk, encode_chunk
from composer_replication.collective.guards import Guards
from composer_replication.collective.layout import Layout
from composer_replication.collective.meeting import Meeting, MeetingRound
from composer_replication.collective.reduce import part_sizes
from composer_replication.errors import RoundError

__all__ = ["InProcessCollective", "InProcessFleet"]


class InProcessFleet:
    """The meeting place of `replicas` collectives with the ids 0 to replicas - 1.

    Args:
        replicas: how many.
        codec: "float32", "bfloat16" or "int8".
        timeout_seconds: how long a replica waits for the others before the run ends with RoundTimeout.
        guards: how outliers are treated, and what kind of mean is taken.
    """

    def __init__(
        self,
        replicas: int,
        *,
        codec: str = "float32",
        timeout_seconds: float = 600.0,
        guards: Guards | None = None,
    ) -> None:
        guards = guards or Guards()
        if replicas < 1:
            raise ValueError(f"replicas must be at least 1, got {replicas}")
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds must be greater than 0, got {timeout_seconds}")
        guards.check_fleet(replicas)
        self._meeting = Meeting(tuple(range(replicas)), check_codec(codec), timeout_seconds, guards)

    @property
    def ids(self) -> tuple[int, ...]:
        return self._meeting.ids

    @property
    def codec(self) -> str:
        return self._meeting.codec

    @property
    def status(self) -> dict[int, dict[str, Any]]:
        """What each replica published last."""
        return dict(self._meeting.status)

    @property
    def results(self) -> dict[int, tuple[str, dict[str, Any]]]:
        """Digest and result of each replica that has finished."""
        return dict(self._meeting.results)

    def collectives(self) -> list[InProcessCollective]:
        """One collective a replica, by ascending id. Each is used by one thread."""
        return [InProcessCollective(self._meeting, replica) for replica in self.ids]


class InProcessCollective:
    """One replica's side of an `InProcessFleet`; satisfies `Collective`."""

    def __init__(self, meeting: Meeting, replica: int) -> None:
        self._meeting = meeting
        self._replica = replica
        self._closed = False

    @property
    def replica(self) -> int:
        return self._replica

    @property
    def fleet(self) -> tuple[int, ...]:
        return self._meeting.ids

    @property
    def overtaken(self) -> bool:
        """True only for a replica that has left: no round closes without one that is expected."""
        meeting = self._meeting
        entry = meeting.rounds.get(meeting.asked.get(self._replica, -1))
        return entry is not None and entry.closing is not None and self._replica not in entry.reports

    def start(self, offered: Snapshot, *, settings: Mapping[str, Any], resumed: bool) -> Snapshot:
        meeting, me = self._meeting, self._replica
        meeting.guards.check_settings(settings)
        with meeting.condition:
            meeting.check()
            if me in meeting.offers:
                raise RoundError(f"replica {me} has started already")
            meeting.offers[me] = Offer(me, offered.round, offered.digest, offered.layout, dict(settings), resumed)
            meeting.snapshots[me] = offered
            if len(meeting.offers) == len(meeting.ids):
                meeting.begin()
            meeting.wait(
                lambda: meeting.source is not None,
                lambda: f"{meeting.missing(meeting.ids, meeting.offers)} to start",
            )
            shared = meeting.shared
            assert shared is not None, "kept until everybody has it"
        answer = offered if resumed or me == meeting.source else _copied(shared)
        with meeting.condition:
            del meeting.snapshots[me]
            meeting.condition.notify_all()
            # Nobody goes on to train in tensors that another replica still copies from.
            meeting.wait(lambda: not meeting.snapshots, lambda: f"{meeting.missing(meeting.snapshots, ())} to start")
            meeting.shared = None
        return answer

    def average(self, contribution: Contribution) -> RoundOutcome:
        meeting, me, number = self._meeting, self._replica, contribution.round
        began = time.monotonic()
        with meeting.condition:
            meeting.check()
            self._enter(number)
            entry = meeting.rounds.setdefault(number, MeetingRound())
            if entry.closing is None:
                entry.reports[me], entry.layouts[me] = contribution.report, contribution.layout
                if entry.reports.keys() >= set(meeting.expected):
                    meeting.close(number, entry)
            meeting.wait(
                lambda: entry.closing is not None,
                lambda: f"{meeting.missing(meeting.expected, entry.reports)} in round {number}",
            )
        waited, sent = time.monotonic() - began, 0
        phases = {"encode": 0.0, "reduce": 0.0}
        assert entry.closing is not None, "wait raises otherwise"
        if any(report.replica == me for report in entry.closing.members):
            for index in range(len(contribution.layout.chunks)):
                sent += self._put(entry, index, contribution, phases)
                if not entry.closing.members:  # the mean isn't finite
                    break
        return self._outcome(number, entry, waited=waited, phases=phases, sent=sent)

    def follow(self, round: int, layout: Layout, base: str, *, wait: bool) -> RoundOutcome | None:
        meeting = self._meeting
        with meeting.condition:
            self._enter(round)
            entry = meeting.rounds.get(round)
            if entry is None or not entry.decided:
                if not wait:
                    return None
                if not meeting.expected and round >= meeting.open:
                    raise RoundError(f"the run is over: nobody is expected in round {round}")
                meeting.check()
                entry = meeting.rounds.setdefault(round, MeetingRound())
        return self._outcome(round, entry, waited=0.0, phases={}, sent=0)

    def applied(self, take: Callable[[], Snapshot]) -> None:
        """Keeps nothing: a fleet of threads dies as one, and is resumed from its replicas' own checkpoints."""

    def publish(self, status: Mapping[str, Any]) -> None:
        self._meeting.status[self._replica] = dict(status)

    def finish(self, digest: str, result: Mapping[str, Any]) -> None:
        self._meeting.results[self._replica] = (digest, dict(result))

    def fail(self, reason: str) -> None:
        """Give up: every other replica that waits, now or later, raises RoundAborted with the reason."""
        with self._meeting.condition:
            self._meeting.abort(f"replica {self._replica} gave up: {reason}")

    def close(self) -> None:
        """Leave the meeting. For the others that still expect this replica, that is giving up."""
        meeting = self._meeting
        with meeting.condition:
            if self._closed:
                return
            self._closed = True
            meeting.asked.pop(self._replica, None)
            meeting.forget()
            if self._replica in meeting.expected:
                meeting.abort(f"replica {self._replica} was closed before the run was over")

    def _enter(self, number: int) -> None:
        meeting = self._meeting
        if self._closed:
            raise RoundError(f"replica {self._replica}'s collective is closed")
        if meeting.source is None:
            raise RoundError("start() comes before the first round")
        if number > meeting.open or (number < meeting.open and number not in meeting.rounds):
            raise RoundError(f"round {number} isn't open: the fleet is at round {meeting.open}")
        meeting.asked[self._replica] = number
        meeting.forget()

    def _put(self, entry: MeetingRound, index: int, contribution: Contribution, phases: dict[str, float]) -> int:
        """Put in one chunk and wait for its mean: the last to come reduces. Nobody holds more than one at a time."""
        meeting = self._meeting
        sizes = part_sizes(contribution.layout.chunks[index])
        members = [report.replica for report in entry.closing.members] if entry.closing else []
        began = time.monotonic()
        try:
            encoded = encode_chunk(meeting.codec, sizes, contribution.chunk(index))
            encoded_at = time.monotonic()
            phases["encode"] += encoded_at - began
            with meeting.condition:
                meeting.check()
                entry.waiting[self._replica] = encoded
                last = len(entry.waiting) == len(members)
            if last:
                meeting.reduce(entry, index)
                phases["reduce"] += time.monotonic() - encoded_at
        except BaseException as error:
            self.fail(f"{type(error).__name__}: {error}")
            raise
        with meeting.condition:
            meeting.wait(
                lambda: len(entry.means) > index or not (entry.closing and entry.closing.members),
                lambda: f"chunk {index} of {meeting.missing(members, entry.waiting) if entry.waiting else 'the mean'}",
            )
        return len(encoded)

    def _outcome(
        self, number: int, entry: MeetingRound, *, waited: float, phases: dict[str, float], sent: int
    ) -> RoundOutcome:
        meeting, began = self._meeting, time.monotonic()
        with meeting.condition:
            meeting.wait(lambda: entry.decided, lambda: f"round {number} to be decided")
        closing, layout = entry.closing, entry.layout
        assert closing is not None and layout is not None, "a decided round has both"
        means, codec = tuple(entry.means), meeting.codec

        def mean(index: int, out: Tensor) -> None:
            if not means:
                raise RoundError(f"round {number} averaged nobody: there is no mean")
            decode_chunk(codec, part_sizes(layout.chunks[index]), means[index], out=out)

        return RoundOutcome(
            round=number,
            members=closing.members,
            absent=closing.absent,
            others=closing.others,
            outliers=closing.treatment.outliers,
            drift=closing.treatment.drift,
            expected_next=closing.expected_next,
            mean_square_norm=entry.square_norm,
            mean=mean,
            wait_seconds=waited + time.monotonic() - began,
            phase_seconds=phases,
            bytes_sent=sent,
            bytes_received=sum(len(payload) for payload in means),
        )


def _copied(snapshot: Snapshot) -> Snapshot:
    return Snapshot(
        round=snapshot.round,
        layout=snapshot.layout,
        anchor=[tensor.clone() for tensor in snapshot.anchor],
        momentum=[tensor.clone() for tensor in snapshot.momentum],
        state=copy.deepcopy(dict(snapshot.state)),
        digest=snapshot.digest,
    )
