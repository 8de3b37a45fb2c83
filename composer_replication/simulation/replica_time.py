"""One replica's clock: what it does from round to round, and where its seconds go.

Invariant: whatever passes is in exactly one part; `free` only grows.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from composer_replication.collective.object_store.roster import Policy
from composer_replication.simulation.exchange import Exchange
from composer_replication.simulation.machines import Draws, Machines, Outage
from composer_replication.simulation.rules import Rules, Watcher

__all__ = ["Parts", "ReplicaClock"]

_TRIES = 1000  # of one interval, before it is said that it never ends


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Seconds: trained and counted, trained in vain, own transfers, waited for others, gone (failed or starting)."""

    train: float = 0.0
    lost: float = 0.0
    exchange: float = 0.0
    wait: float = 0.0
    down: float = 0.0

    @property
    def whole(self) -> float:
        return self.train + self.lost + self.exchange + self.wait + self.down

    def plus(self, other: Parts) -> Parts:
        names = [field.name for field in dataclasses.fields(Parts)]
        return Parts(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(slots=True)
class _Stretch:
    what: Literal["train", "lost", "up", "down"]
    start: float
    end: float


class ReplicaClock:
    """One replica. `free` is when it can begin its next interval; infinite once it is gone for good."""

    def __init__(self, replica: int, machines: Machines, rules: Rules, policy: Policy, exchange: Exchange) -> None:
        self.replica, self.watcher = replica, Watcher(rules, policy, replica)
        self._machines, self._rules, self._exchange = machines, rules, exchange
        self._draws = Draws(machines, replica)
        self.free = machines.startup_seconds
        self.alive_at = math.inf  # when it has said so, after a round that it missed
        self.parts = Parts()  # of the present round
        self.total = self._before = Parts(down=machines.startup_seconds)
        self.intervals_lost = 0
        self._gone_at = math.inf
        self.trained = self.ready = math.inf
        self._stretches: list[_Stretch] = []
        self._outages: list[Outage] = []

    # -- an interval

    def begin(self, steps: int) -> None:
        """Train, and put the contribution into the store, as if nobody closed the round before."""
        self.parts, self._before = self._before, Parts()
        self._stretches, self._outages = [], []
        self.trained = self.ready = math.inf
        if math.isinf(self.free):
            return
        now, done, seconds = self.free, 0.0, self._draws.steps(steps)
        for _ in range(_TRIES):
            trained = now + seconds - done
            ready = self._exchange.up(self.replica, trained)
            outage = self._draws.outage(now, ready)
            if outage is None:
                self._stretches += [_Stretch("train", now, trained), _Stretch("up", trained, ready)]
                self.trained, self.ready = trained, ready
                return
            until = min(outage.at, trained)
            self._stretches += [_Stretch("train", now, until), _Stretch("up", until, outage.at)]
            if outage.warned:
                done += until - now
            else:
                self._lose()
                done, seconds = 0.0, self._draws.steps(steps)
            self._outages.append(outage)
            now = outage.at + outage.seconds
            self._stretches.append(_Stretch("down", outage.at, now))
            if math.isinf(now):
                return
        raise ValueError(
            f"replica {self.replica} never gets through an interval of {steps} steps, which takes {seconds:.0f} s: it "
            "fails too often for that; shorten the interval"
        )

    def limits(self, expected: tuple[int, ...]) -> tuple[float, float]:
        return self.watcher.limits(self.trained - self.free, expected)

    # -- how it ends

    def take_part(self, end: float, place: int, members: int, number: int) -> None:
        """Averaged: through at `end`, unless it is killed meanwhile; its contribution counts all the same."""
        self._note_restarts(self._outages)
        own = self._exchange.alone(self.replica, place, members, number)
        again = sum(s.end - s.start for s in self._stretches if s.what == "up") - (self.ready - self.trained)
        self._close(self.ready, end, own + again, members, number)
        self.alive_at = math.inf

    def miss(self, decided: float, written: float, members: int, number: int) -> None:
        """The round has gone on without it: it stops when it notices, and takes the result."""
        if math.isinf(self.free):
            return
        noticed = decided + 0.5 * (self._rules.heartbeat_seconds + self._machines.step_of(self.replica))
        stop = max(self.free, min(noticed, self.ready))
        for stretch in self._stretches:
            if stretch.what == "down" and stretch.start < stop and stretch.end > decided:
                stop = stretch.end
                break
        after = [outage for outage in self._outages if outage.at >= stop]
        self._draws.give_back(after)
        self._outages = [outage for outage in self._outages if outage.at < stop]
        self._note_restarts(self._outages)
        self._cut(stop)
        if math.isinf(stop):
            self._gone()
            return
        began = max(stop, written)
        end = self._exchange.fetched(self.replica, began, members, number)
        up = sum(s.end - s.start for s in self._stretches if s.what == "up")
        self._close(stop, end, up + end - began, members, number)
        self.alive_at = self.free

    def give_up(self, at: float) -> None:
        """The run ends here, with nothing to show for this interval."""
        if math.isinf(self.free):
            return
        self._note_restarts([outage for outage in self._outages if outage.at < at])
        self._cut(max(at, self.free))
        if math.isinf(at):  # nobody is left who could give up
            self._gone()
            return
        self._account(max(at, self.free), self._sum("up"))

    @property
    def last(self) -> float:
        """The last moment at which it did something."""
        return self.free if math.isfinite(self.free) else self._gone_at

    def end(self, whole: float) -> None:
        """The run is over: what is left has been waited, or missed."""
        rest = Parts(wait=whole - self.free) if math.isfinite(self.free) else Parts(down=whole - self._gone_at)
        self.parts, self.total = self.parts.plus(rest), self.total.plus(rest)

    def back_from_outage(self, until: float) -> float | None:
        """When it is back if it fails between its contribution and `until`; looks only."""
        outage = self._draws.outage(self.ready, max(until, self.ready))
        if outage is None:
            return None
        self._draws.give_back([outage])
        return outage.at + outage.seconds

    # -- inside

    def _close(self, since: float, end: float, transfers: float, members: int, number: int) -> None:
        """Account for a round that is over at `end`, or later if the replica fails after `since`."""
        tries = 0
        while (outage := self._draws.outage(since, end)) is not None:
            tries += 1
            # One that fails more often than a transfer takes never comes to its end.
            since = outage.at + (outage.seconds if tries <= _TRIES else math.inf)
            self._stretches.append(_Stretch("down", outage.at, since))
            self.watcher.restarted()
            if math.isinf(since):
                self._gone()
                return
            again = self._exchange.fetched(self.replica, since, members, number)
            if again > end:
                transfers += again - max(end, since)
                end = again
        self._account(end, transfers)

    def _account(self, end: float, transfers: float) -> None:
        parts = self._counted()
        left = max(end - self.free - parts.whole, 0.0)
        exchange = min(transfers, left)
        self._take(dataclasses.replace(parts, exchange=exchange, wait=left - exchange))
        self.free = end

    def _gone(self) -> None:
        """For good: what it did until then, and the rest of the run is for `end` to count."""
        last = next(stretch for stretch in self._stretches if math.isinf(stretch.end))
        self._gone_at = last.start
        self._stretches.remove(last)
        parts = self._counted()
        left = max(last.start - self.free - parts.whole, 0.0)
        exchange = min(self._sum("up"), left)
        self._take(dataclasses.replace(parts, exchange=exchange, wait=left - exchange))
        self.free = self.alive_at = math.inf

    def _take(self, parts: Parts) -> None:
        self.parts, self.total = self.parts.plus(parts), self.total.plus(parts)

    def _counted(self) -> Parts:
        return Parts(train=self._sum("train"), lost=self._sum("lost"), down=self._sum("down"))

    def _sum(self, what: str) -> float:
        return sum(s.end - s.start for s in self._stretches if s.what == what)

    def _cut(self, at: float) -> None:
        """What was trained until then is lost; what would have come isn't."""
        kept = [_Stretch(s.what, s.start, min(s.end, at)) for s in self._stretches if s.start < at]
        self._stretches = kept
        if any(stretch.what == "train" for stretch in kept):
            self.intervals_lost += 1
        self._lose()

    def _lose(self) -> None:
        for stretch in self._stretches:
            if stretch.what == "train":
                stretch.what = "lost"

    def _note_restarts(self, outages: list[Outage]) -> None:
        for outage in outages:
            self.watcher.restarted()
            if not outage.warned:
                self.intervals_lost += 1
