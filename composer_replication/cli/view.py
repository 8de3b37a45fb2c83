"""What a store tells about a run, for people: who is there, what was decided, how it goes.

Invariant: reads only. What it shows of rounds comes from the rosters, which are never wrong; what it shows of a replica
between two rounds comes from its heartbeat, which may be some seconds old.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from composer_replication.cli.live import FleetView, Row
from composer_replication.collective.object_store import keys
from composer_replication.collective.object_store.entrants import Entrants
from composer_replication.collective.object_store.epochs import Epoch, EpochStore, read_epochs, read_fleet
from composer_replication.collective.object_store.history import decided
from composer_replication.collective.object_store.joining import fleet_sizes
from composer_replication.collective.object_store.pointers import Roster
from composer_replication.collective.object_store.requests import there
from composer_replication.collective.object_store.wire import load
from composer_replication.diloco.observed import steps_of, tokens_of
from composer_replication.errors import ObjectCorrupt, ObjectMissing, StoreError
from composer_replication.store import ObjectStore

__all__ = ["ClosedRound", "RunReader", "Straggler", "shows_life"]

_UNDER_WAY = ("training", "waiting", "following", "joining")
_MAX_BYTES = 64 * 1024 * 1024  # fleet.json names every tensor of the model
_FLEET_SECONDS = 10.0  # between two looks at it


@dataclass(frozen=True, kw_only=True)
class ClosedRound:
    """One round of the run's history."""

    round: int
    steps: int  # inner steps of the interval
    position: int  # inner steps of the run, this interval's included
    members: tuple[int, ...]
    tokens: int | None
    absent: Mapping[int, str] = field(default_factory=dict)
    metrics: Mapping[int, Mapping[str, float]] = field(default_factory=dict)  # by replica: loss, tokens_per_second, ...

    @property
    def loss(self) -> float | None:
        """Mean over those that were averaged and told a finite one."""
        losses = [m["loss"] for m in self.metrics.values() if math.isfinite(m.get("loss", math.nan))]
        return sum(losses) / len(losses) if losses else None


def _closed_round(roster: Roster, before: int) -> ClosedRound:
    steps = steps_of(roster.members or roster.others)
    return ClosedRound(
        round=roster.round,
        steps=steps,
        position=before + steps,
        members=tuple(report.replica for report in roster.members),
        tokens=tokens_of(roster.members) if roster.members else None,
        absent=dict(roster.absent),
        metrics={report.replica: dict(report.metrics) for report in roster.members},
    )


def shows_life(rows: Iterable[Row]) -> bool | None:
    """Does any replica? None while none has ever been seen."""
    seen = [row for row in rows if row.state != "not seen"]
    return any(row.alive for row in seen) if seen else None


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """Who came last in a round, and how long after the one that waited longest for it."""

    round: int
    replica: int
    seconds: float


class RunReader:
    """Reads one run, again and again: rounds that were read once are kept."""

    def __init__(self, store: ObjectStore, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._place = store
        self._clock = clock
        self._fleet_due = clock()
        self._epochs: tuple[Epoch, ...] = ()
        self.store = store  # as the run's newest epoch sees it
        self.rounds: list[ClosedRound] = []
        self.rosters: list[Roster] = []  # of those rounds
        self.fleet: Mapping[str, Any] | None = None  # fleet.json
        self._present = False  # it is the newest epoch's
        self.trouble = ""  # why the open round was given up, if it was
        self.ended = False
        self._held: int | None = None  # the attempt of the last round that holds
        self._entrants: Entrants | None = None
        self._sizes: dict[int, int] | None = None
        self._nonce: object = None  # of the fleet that began the run

    def refresh(self) -> None:
        """Look for what is new. Raises StoreError if the store fails."""
        self._look_for_another_run()
        self._look_for_epoch()
        if not self._present and (self.fleet is None or there(self.store, keys.FLEET)):
            self._look_for_fleet()
        if self.fleet is None:
            return
        try:
            self._look_for_rounds()
        except ObjectCorrupt:
            self._fleet_due = -math.inf
            self._look_for_another_run()
            if self.fleet is None:  # there is one
                return self.refresh()
            self.ended = self._json(keys.FINAL) is not None  # damage hides what comes after it, but not that
            raise
        self.ended = self._json(keys.FINAL) is not None

    def _look_for_rounds(self) -> None:
        if self._entrants is None:
            self._entrants = Entrants(self.store, self.run, self.replicas)
        self._entrants.look()
        if self._held is not None:  # its roster may have been void: then another attempt follows
            self._take(len(self.rounds) - 1, self._held + 1)
        while self._take(len(self.rounds), 0):
            pass

    def _look_for_another_run(self) -> None:
        """There may be another run in its place now, or none any more: then nothing of the old one is shown."""
        if self.fleet is not None and self._clock() < self._fleet_due and self._last_is_there():
            return
        try:
            nonce = load(self._place.get(keys.FLEET, max_bytes=_MAX_BYTES), keys.FLEET).get("nonce")
        except ObjectMissing:
            nonce = None
        except ObjectCorrupt:
            return  # whoever reads it next says so
        if nonce != self._nonce and self._nonce is not None:
            self.__init__(self._place, clock=self._clock)
        self._nonce, self._fleet_due = nonce, self._clock() + _FLEET_SECONDS

    def _last_is_there(self) -> bool:
        """Is what was read last there still, and this run's?"""
        try:
            if not self.rosters:
                return bool(self.ids) and there(self.store, keys.member(self.ids[0]))
            last = self.rosters[-1]
            return decided(self.store, self.run, last.round, last.attempt) is not None
        except ObjectCorrupt:
            return False

    def _look_for_epoch(self) -> None:
        """The run may have been resumed with another fleet, from an earlier round."""
        epochs = read_epochs(self._place)
        if len(epochs) > len(self._epochs):
            self._epochs, self.store = epochs, EpochStore(self._place, epochs)
            self.fleet, self._entrants, self.trouble, self.ended = None, None, "", False
            self._present, self._held, self._sizes = False, None, None
            del self.rounds[max(epochs[-1].first - 1, 0) :]  # the round before it is read again
            del self.rosters[len(self.rounds) :]

    def _look_for_fleet(self) -> None:
        try:
            self.fleet, present = read_fleet(self.store)
        except ObjectCorrupt as error:
            raise StoreError(f"{self.store.uri}: {error}") from error
        self._present = present and self.fleet is not None

    def _take(self, round: int, attempt: int) -> bool:
        """Read the attempts of a round from `attempt` on; True if one of them holds."""
        held = None
        while (found := decided(self.store, self.run, round, attempt)) is not None:
            if found.roster.kind == "roster":
                held, self.trouble = found.roster, ""
            else:
                self.trouble = found.roster.reason or found.roster.kind
            attempt += 1
        if held is not None:
            before = self.rounds[round - 1].position if round else 0
            self.rounds[round:], self.rosters[round:] = [_closed_round(held, before)], [held]
            self._held = held.attempt
        return held is not None

    @property
    def stragglers(self) -> list[Straggler]:
        """Of each closed round; the members of the next one tell (the last one's isn't known yet)."""
        found: list[Straggler] = []
        for closed, after in zip(self.rounds, self.rounds[1:], strict=False):
            told = [m for m in after.metrics.values() if "straggler" in m and "straggler_seconds" in m]
            if told:
                most = max(told, key=lambda m: m["straggler_seconds"])
                found.append(
                    Straggler(
                        round=closed.round, replica=int(most["straggler"]), seconds=float(most["straggler_seconds"])
                    )
                )
        return found

    @property
    def sizes(self) -> dict[int, int]:
        """The first round of each epoch -> how many replicas it began with."""
        if self._sizes is None:
            self._sizes = fleet_sizes(self._place)
        return self._sizes

    @property
    def run(self) -> str:
        return str((self.fleet or {}).get("nonce") or "")

    @property
    def replicas(self) -> int:
        """How many the run, or its newest epoch, began with."""
        return self._epochs[-1].replicas if self._epochs else int((self.fleet or {}).get("replicas") or 0)

    @property
    def ids(self) -> tuple[int, ...]:
        """All replicas, those that joined later included."""
        return self._entrants.fleet if self._entrants is not None else ()

    def view(self, title: str) -> FleetView:
        """Of what was read last, and of the heartbeats now."""
        last = self.rounds[-1] if self.rounds else None
        return FleetView(
            title=title,
            rows=[self._row(replica, last) for replica in self.ids],
            round=len(self.rounds) if self.fleet is not None else None,
            ended=self.ended,
        )

    def _row(self, replica: int, last: ClosedRound | None) -> Row:
        try:
            beat = self._json(keys.member(replica)) or {}
        except ObjectCorrupt as error:  # it hides nothing but this replica, and the next beat mends it
            return Row(replica=replica, state="unreadable", note=str(error.__cause__))
        status = beat.get("status") or {}
        metrics = dict(last.metrics.get(replica, {})) if last is not None else {}
        trains = (last is not None and replica in last.members) or bool(status.get("step"))
        state = str(status.get("state") or ("training" if trains else "joining" if beat else "not seen"))
        note = str(status.get("error") or "")
        alive = False
        if beat.get("state") == "fenced":
            state = "fenced"
        elif beat.get("state") == "closed" and state in _UNDER_WAY:
            state = "stopped"
        elif beat.get("state") == "running":
            silent = time.time() - float(beat.get("time") or 0.0)
            alive = silent <= 15.0 + 3.0 * float(beat.get("heartbeat_seconds") or 5.0)
            if not alive:
                note = f"silent for {silent:.0f} s"
        round, step = status.get("round"), status.get("step")
        if last is not None and (round is None or round <= last.round):  # the heartbeat is behind
            round, step = last.round + 1, last.position
        return Row(
            replica=replica,
            state=state,
            round=round,
            step=step,
            horizon=status.get("horizon") or (last.steps if last is not None else None),
            loss=metrics.get("loss", status.get("loss")),
            tokens_per_second=metrics.get("tokens_per_second", status.get("tokens_per_second")),
            wait_seconds=status.get("wait_seconds"),
            note=note,
            alive=alive,
        )

    def _json(self, key: str) -> Mapping[str, Any] | None:
        try:
            return load(self.store.get(key, max_bytes=_MAX_BYTES), key)
        except ObjectMissing:
            return None
        except ObjectCorrupt as error:
            raise ObjectCorrupt(f"{self.store.uri}: {error}") from error
