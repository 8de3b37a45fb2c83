"""The seam between the outer loop and whatever carries its tensors.

A `Collective` averages contributions over the replicas of a fleet, one round at a time. It moves
bytes and agrees on who is averaged; it knows nothing of outer steps or policies.

Invariant: everything in a `RoundOutcome` but `lateness`, `wait_seconds`, `phase_seconds` and the byte counts is the
same on every replica of the fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from composer_replication.collective.layout import Layout

__all__ = ["Collective", "Contribution", "Report", "RoundOutcome", "Snapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one replica says about its interval: small, plain values. Crosses the wire as JSON, floats in hex."""

    replica: int
    steps: int  # inner steps of this interval that changed the weights
    tokens: int | None  # non-padding input tokens of this interval; None: not counted
    mass: float  # sum of the learning rates of those steps
    square_norm: float  # squared norm of the pseudo-gradient (parameters only), before the codec
    finite: bool  # False: nothing is sent; the replica takes part without being averaged
    leaving: bool  # True: this is its last contribution
    next_lr: float
    preview: tuple[float, ...]  # sums of the next learning rates on the policy's grid
    remaining: int | None  # inner steps left in this replica's budget
    base: str  # digest of anchor, momentum and controller that the interval started from
    layout: str  # fingerprint of the tensors that were trained in this interval
    weight: float = 1.0  # share in the mean, before normalisation; 1 for all, or the tokens seen
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # for people: loss, tokens per second
    longest_wait_seconds: float | None = None  # for the last of the others, in the round before; None: it can't tell


@dataclass(frozen=True, slots=True)
class Contribution:
    """One replica's part of one round.

    `chunk(i)` gives the pseudo-gradient of the i-th chunk of `layout.chunks` as one contiguous 1-D float32
    CPU tensor of `layout.chunks[i].elements` elements, computed when asked for. The tensor may be a buffer
    that the next call reuses.
    """

    round: int
    report: Report
    layout: Layout
    chunk: Callable[[int], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOutcome:
    """A closed round.

    `mean(i, out)` decodes the agreed mean of chunk i into `out`, a 1-D float32 CPU tensor of the chunk's
    size. It may be called once or more for each chunk until the collective's next call. There is no mean to
    ask for when `members` is empty.
    """

    round: int
    members: tuple[Report, ...]  # who was averaged, by ascending replica id
    absent: Mapping[int, str]  # expected or present replicas that were not averaged, and why
    others: tuple[Report, ...] = ()  # reports of replicas that took part without being averaged, by ascending id
    outliers: Mapping[int, str] = field(default_factory=dict[int, str])  # members whose norms stick out, what was done
    drift: float | None = None  # squared norms of what was averaged, brought together; None: plain mean of the members'
    expected_next: tuple[int, ...]  # whom the next round waits for; empty: the run is over
    fleet_size: int | None = None  # replicas that the fleet of this round began with; None: as many as now
    mean_square_norm: float  # squared norm of the decoded mean over the parameters
    mean: Callable[[int, Tensor], None]
    # how it went here, for people
    lateness: Mapping[int, float] = field(default_factory=dict[int, float])
    # ^ seconds after this replica's own contribution at which each other one's was there, of those that took part
    wait_seconds: float = 0.0  # waiting for others
    phase_seconds: Mapping[str, float] = field(default_factory=dict[str, float])  # encode, write, read, reduce, decode
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The shared state at the start of a round: enough for a newcomer to go on from.

    Tensors are 1-D float32 on the CPU, in the order of `layout.slots`, one for each slot. `momentum` is
    empty at round 0 (all zero).
    """

    round: int
    layout: Layout
    anchor: Sequence[Tensor]
    momentum: Sequence[Tensor]
    state: Mapping[str, Any]  # JSON values: controller state, plan, position
    digest: str
    # of what `start` returns
    ended: bool = False  # nobody is expected any more: it is the run's last state
    awaited: bool = False  # the coming round waits for this replica


class Collective(Protocol):
    """Averages contributions over the replicas of a fleet, round by round. Not thread-safe; one per replica."""

    @property
    def replica(self) -> int: ...

    @property
    def fleet(self) -> tuple[int, ...]:
        """The replica ids that the run began with, ascending."""
        ...

    @property
    def overtaken(self) -> bool:
        """True once the present round was decided without this replica: its interval can be dropped. Cheap."""
        ...

    def start(self, offered: Snapshot, *, settings: Mapping[str, Any], resumed: bool) -> Snapshot:
        """Join the fleet and agree on where to begin. Called once, first.

        `resumed` False: `offered` is this process's fresh state at round 0. The fleet's first state (of the
        lowest id) or its latest checkpoint is returned, and the caller goes on from that. `resumed` True:
        `offered` comes from the caller's own checkpoint and is returned if the fleet has known it.
        Raises FleetMismatch (naming what differs), ReplicaTaken, StoreError.
        """
        ...

    def average(self, contribution: Contribution) -> RoundOutcome:
        """Put one contribution in and wait for the round to close.

        If the round was already decided without this replica, gives that outcome. Raises RoundAborted,
        RoundTimeout, Diverged, Fenced, Interrupted, StoreError.
        """
        ...

    def follow(self, round: int, layout: Layout, base: str, *, wait: bool) -> RoundOutcome | None:
        """The outcome of a round that this replica takes no part in; None if it is open still and `wait` is False."""
        ...

    def applied(self, take: Callable[[], Snapshot]) -> None:
        """The last outcome's outer step was applied; `take()` gives the state it led to, for a checkpoint if due."""
        ...

    def publish(self, status: Mapping[str, Any]) -> None:
        """Show people how this replica is doing (heartbeat). Decides nothing, never raises, cheap."""
        ...

    def finish(self, digest: str, result: Mapping[str, Any]) -> None:
        """Record how this replica ended; with its digest, when it ended with the fleet's final state."""
        ...

    def close(self) -> None:
        """Stop heartbeats and let go of handles. Harmless when called again."""
        ...
