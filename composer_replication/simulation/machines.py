"""What a fleet runs on: how fast its machines and links are, and when they fail.

Invariant: the same Machines give the same draws everywhere; each replica's are its own, so that one more replica, or
a longer interval, changes none of the others'.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from composer_replication.collective.object_store.costs import Link

__all__ = ["Draws", "LinkDown", "Machines", "Outage"]


_MOST_PER_HOUR = 3600  # once a second


@dataclass(frozen=True, kw_only=True)
class Outage:
    """A replica is gone from `at` seconds after the run's beginning, for `seconds`; infinite: for good.

    A `warned` one has time to write a checkpoint first, as on SIGTERM: it goes on in the middle of its interval. Else
    it is killed, and begins the interval again.
    """

    replica: int
    at: float
    seconds: float
    warned: bool = False

    def __post_init__(self) -> None:
        if not (self.at >= 0 and math.isfinite(self.at)):
            raise ValueError(f"replica {self.replica} can't fail at {self.at} s")
        if not self.seconds > 0:
            raise ValueError(f"replica {self.replica} can't be gone for {self.seconds} s")


@dataclass(frozen=True, kw_only=True)
class LinkDown:
    """A replica's link carries nothing from `at` on, for `seconds`."""

    replica: int
    at: float
    seconds: float

    def __post_init__(self) -> None:
        if not (self.at >= 0 and math.isfinite(self.at)):
            raise ValueError(f"the link of replica {self.replica} can't break at {self.at} s")
        if not (self.seconds > 0 and math.isfinite(self.seconds)):
            raise ValueError(f"the link of replica {self.replica} can't be down for {self.seconds} s")


@dataclass(frozen=True, kw_only=True)
class Machines:
    """What the fleet runs on.

    Args:
        step_seconds: of one inner step on a machine of the usual speed.
        link: every replica's way to the store, bytes per second each way.
        links: by replica, those that differ from it.
        slower: by replica, how many times as long a step takes there (1.3: a third slower).
        jitter: by how much a step's time varies: its standard deviation as a part of its mean. Steps vary
            independently of each other (a gamma distribution).
        outages, links_down: given ones.
        failures_per_hour: of each machine: killed without warning, at random moments.
        preemptions_per_hour: the same, with a warning.
        restart_seconds: until a replica that failed at random trains again.
        startup_seconds: before the first step.
        peer_seconds: of a message from one replica to the next, for an all-reduce of every step (see lockstep.py).
        seed: of jitter and failures.
    """

    step_seconds: float
    link: Link
    links: Mapping[int, Link] = field(default_factory=dict[int, Link])
    slower: Mapping[int, float] = field(default_factory=dict[int, float])
    jitter: float = 0.0
    outages: tuple[Outage, ...] = ()
    links_down: tuple[LinkDown, ...] = ()
    failures_per_hour: float = 0.0
    preemptions_per_hour: float = 0.0
    restart_seconds: float = 60.0
    startup_seconds: float = 0.0
    peer_seconds: float = 0.001
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.step_seconds < math.inf:
            raise ValueError(f"step_seconds must be more than 0, got {self.step_seconds}")
        for whose, link in (("the link", self.link), *((f"the link of replica {r}", v) for r, v in self.links.items())):
            for name, value in (("up", link.up), ("down", link.down)):
                if not value > 0:
                    raise ValueError(f"{whose}'s {name} must be more than 0 bytes per second, got {value}")
        for replica, factor in self.slower.items():
            if not 0 < factor < math.inf:
                raise ValueError(f"replica {replica} can't be {factor} times as slow")
        for name in ("jitter", "failures_per_hour", "preemptions_per_hour", "startup_seconds", "peer_seconds"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {value}")
        for name in ("failures_per_hour", "preemptions_per_hour"):
            if getattr(self, name) > _MOST_PER_HOUR:
                raise ValueError(f"{name} must be {_MOST_PER_HOUR} or less, got {getattr(self, name)}")
        if not 0 < self.restart_seconds < math.inf:
            raise ValueError(f"restart_seconds must be more than 0, got {self.restart_seconds}")

    def check_fleet(self, replicas: int) -> None:
        """Raises ValueError for a replica that a fleet of so many hasn't got."""
        named = (*self.slower, *self.links, *(o.replica for o in self.outages), *(d.replica for d in self.links_down))
        for replica in named:
            if not 0 <= replica < replicas:
                raise ValueError(f"there is no replica {replica} in a fleet of {replicas}")

    def link_of(self, replica: int) -> Link:
        return self.links.get(replica, self.link)

    def step_of(self, replica: int) -> float:
        """Mean seconds of a step there."""
        return self.step_seconds * self.slower.get(replica, 1.0)

    def carried(self, replica: int, start: float, seconds: float) -> float:
        """When a transfer is over that takes so many seconds of a working link."""
        if not self.links_down:
            return start + seconds
        now = start
        for down in sorted((d for d in self.links_down if d.replica == replica), key=lambda d: d.at):
            end = down.at + down.seconds
            if end <= now:
                continue
            if now + seconds <= down.at:
                break
            seconds -= max(down.at - now, 0.0)
            now = end
        return now + seconds


class Draws:
    """What chance does to one replica, in order."""

    def __init__(self, machines: Machines, replica: int) -> None:
        self._jitter, self._step = machines.jitter, machines.step_of(replica)
        self._times = random.Random(f"times {machines.seed} {replica}")
        self._failures = _merged(machines, replica)
        self._ahead: deque[Outage] = deque()

    def steps(self, count: int) -> float:
        """Seconds of so many steps: a sum of gamma-distributed times is one, too."""
        if self._jitter < 1e-6:  # the distribution's shape would leave what floats can hold
            return count * self._step
        square = self._jitter * self._jitter
        return self._times.gammavariate(count / square, self._step * square)

    def outage(self, start: float, end: float) -> Outage | None:
        """The first one in [start, end), taken; what would have come while the replica was gone already is dropped."""
        while True:
            if not self._ahead:
                following = next(self._failures, None)
                if following is None:
                    return None
                self._ahead.append(following)
            if self._ahead[0].at >= end:
                return None
            found = self._ahead.popleft()
            if found.at >= start:
                return found

    def give_back(self, outages: Iterable[Outage]) -> None:
        """They are still to come after all."""
        self._ahead.extendleft(sorted(outages, key=lambda outage: outage.at, reverse=True))


def _merged(machines: Machines, replica: int) -> Iterator[Outage]:
    given = sorted((outage for outage in machines.outages if outage.replica == replica), key=lambda o: o.at)
    streams = [iter(given)]
    for name, rate, warned in (
        ("failures", machines.failures_per_hour, False),
        ("preemptions", machines.preemptions_per_hour, True),
    ):
        if rate:
            chance = random.Random(f"{name} {machines.seed} {replica}")
            streams.append(_at_random(chance, rate, machines.restart_seconds, replica, warned))
    waiting = [next(stream, None) for stream in streams]
    while True:
        here = [(outage.at, index) for index, outage in enumerate(waiting) if outage is not None]
        if not here:
            return
        _, index = min(here)
        outage = waiting[index]
        assert outage is not None
        yield outage
        waiting[index] = next(streams[index], None)


def _at_random(chance: random.Random, per_hour: float, seconds: float, replica: int, warned: bool) -> Iterator[Outage]:
    now = 0.0
    while True:
        now += chance.expovariate(per_hour / 3600.0)
        if math.isinf(now):  # so seldom that it isn't a number
            return
        yield Outage(replica=replica, at=now, seconds=seconds, warned=warned)
