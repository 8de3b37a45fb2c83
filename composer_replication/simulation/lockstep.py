"""How long the same machines take if they average their gradients in every step (DDP), to compare with.

Invariant: counted in that method's favour: gradients travel while the step computes, as if all of it could overlap, and
checkpoints cost nothing. So it takes at least what is said here.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from composer_replication.simulation.machines import Draws, Machines, Outage

__all__ = ["Lockstep", "lockstep"]

_SAMPLES = 2000  # steps that are drawn to find what the slowest of all replicas takes on average
_FAILURES = 20_000  # before it is said that it never ends


@dataclass(frozen=True, kw_only=True)
class Lockstep:
    """`seconds` of the run, infinite if it never ends. Of a step: what computing takes on the slowest replica, and
    the all-reduce. `lost` seconds were trained in vain, and for `down` everybody waited for whoever had failed."""

    seconds: float
    step_seconds: float
    compute_seconds: float
    all_reduce_seconds: float
    lost: float
    down: float

    @property
    def utilisation(self) -> float:
        """Of the slowest replica: the part of the time in which it computed, and it counted."""
        useful = self.seconds - self.lost - self.down
        return self.compute_seconds / self.step_seconds * useful / self.seconds if self.seconds else 0.0


def lockstep(
    steps: int,
    machines: Machines,
    *,
    replicas: int,
    elements: int,
    bytes_per_element: int = 4,
    checkpoint_seconds: float = 600.0,
) -> Lockstep:
    """So many steps of all replicas together, over a ring of their links.

    In a ring each replica sends and receives 2 (N − 1)/N of the gradients, in 2 (N − 1) messages, at the pace of the
    slowest link. If one fails all go back to the last checkpoint, of which there is one every `checkpoint_seconds` of
    progress, and wait until it is there again.
    """
    machines.check_fleet(replicas)
    rate = min(min(machines.link_of(replica).up, machines.link_of(replica).down) for replica in range(replicas))
    hops = 2 * (replicas - 1)
    reduce = hops / replicas * elements * bytes_per_element / rate + hops * machines.peer_seconds
    compute = _slowest(machines, replicas)
    step = max(compute, reduce)
    now, done, kept, lost, down = machines.startup_seconds, 0.0, 0.0, 0.0, machines.startup_seconds
    draws = [Draws(machines, replica) for replica in range(replicas)]
    breaks = sorted((one.at, one.at + one.seconds) for one in machines.links_down) if replicas > 1 else []
    for _ in range(_FAILURES):
        end = now + (steps - done) * step
        if breaks and breaks[0][0] < end:
            at, until = breaks[0]
            outage = _first(draws, now, max(at, now))
            if outage is None:
                breaks.pop(0)
                done += max(at - now, 0.0) / step
                down += max(until - max(at, now), 0.0)
                now = max(until, now)
                continue
        else:
            outage = _first(draws, now, end)
        if outage is None:
            return Lockstep(
                seconds=end,
                step_seconds=step,
                compute_seconds=compute,
                all_reduce_seconds=reduce,
                lost=lost,
                down=down,
            )
        done += (outage.at - now) / step
        kept = max(kept, done * step // checkpoint_seconds * checkpoint_seconds / step)
        if outage.warned:
            kept = done
        lost += (done - kept) * step
        done = kept
        now, down = outage.at + outage.seconds, down + outage.seconds
        if math.isinf(now):
            break
    return Lockstep(
        seconds=math.inf,
        step_seconds=step,
        compute_seconds=compute,
        all_reduce_seconds=reduce,
        lost=lost,
        down=down,
    )


def _slowest(machines: Machines, replicas: int) -> float:
    """Mean seconds of a step on whichever replica happens to be the slowest in it."""
    own = [machines.step_of(replica) for replica in range(replicas)]
    if machines.jitter < 1e-6:
        return max(own)
    chance = random.Random(f"lockstep {machines.seed}")
    square = machines.jitter * machines.jitter
    drawn = (max(chance.gammavariate(1 / square, mean * square) for mean in own) for _ in range(_SAMPLES))
    return sum(drawn) / _SAMPLES


def _first(draws: list[Draws], start: float, end: float) -> Outage | None:
    """The first failure of anyone; those of others that come while it is gone are dropped by the next call."""
    found = [(outage.at, index, outage) for index, one in enumerate(draws) if (outage := one.outage(start, end))]
    if not found:
        return None
    found.sort(key=lambda item: item[:2])
    for _, index, outage in found[1:]:
        draws[index].give_back([outage])
    return found[0][2]
