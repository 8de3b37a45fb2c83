"""Numbers out of kept runs: what a line of a table says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev
from typing import Any

__all__ = ["Spread", "ends_at", "last_loss", "losses", "losses_between", "rounds", "sent", "spread"]

Run = dict[str, Any]


@dataclass(frozen=True)
class Spread:
    """Over seeds: mean and standard deviation (of the sample)."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return mean(self.values)

    @property
    def deviation(self) -> float:
        return stdev(self.values) if len(self.values) > 1 else 0.0

    @property
    def median(self) -> float:
        return median(self.values)

    def text(self, digits: int = 4, *, sign: bool = False) -> str:
        middle = f"{self.mean:{'+' if sign else ''}.{digits}f}"
        return middle if len(self.values) == 1 else f"{middle} ± {self.deviation:.{digits}f}"


def spread(values: Sequence[float]) -> Spread:
    return Spread(tuple(values))


def rounds(run: Run) -> int:
    """How often the fleet exchanged something."""
    return int(run["result"]["synchronisations"])


def losses(run: Run) -> list[tuple[int, int, float]]:
    """(first step, steps done at its end, mean training loss of all replicas) of each interval."""
    if run["policy"]["name"] == "ddp":
        ends = [(int(position), float(loss)) for position, loss in run["losses"]]
    else:
        ends = [(one["position"], one["loss"]) for one in run["rounds"]]
    begins = [0, *(position for position, _ in ends)]
    return [(begin, end, loss) for begin, (end, loss) in zip(begins, ends, strict=False)]


def losses_between(run: Run, first: int, last: int) -> float:
    """Mean training loss of the steps from `first` to `last`; an interval counts by the steps it has in there."""
    total, weight = 0.0, 0
    for begin, end, loss in losses(run):
        within = min(end, last) - max(begin, first)
        if within > 0:
            total, weight = total + loss * within, weight + within
    return total / weight


def last_loss(run: Run, share: float = 0.1) -> float:
    """Mean training loss of the last tenth of the steps."""
    steps = int(run["steps"])
    return losses_between(run, steps - round(share * steps), steps)


def sent(run: Run) -> int:
    """Bytes of pseudo-gradients and means that one replica sent."""
    return int(run["result"]["bytes_sent"])


def ends_at(run: Run, name: str) -> list[tuple[int, float]]:
    """(steps done, value) of each round that has one."""
    return [(one["position"], one[name]) for one in run["rounds"] if one.get(name) is not None]
