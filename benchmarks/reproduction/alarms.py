"""How often the classifier calls a steady run's interval unusual, by `scale_floor`: from kept fixed-interval runs.

At a fixed interval nothing that the controller does can be the cause of what it sees, so every alarm is the noise of
the two statistics against a scale that was estimated from few residuals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import stdev

from benchmarks.reproduction.measures import Run
from composer_replication.autoloco.config import AutoLoCoConfig
from composer_replication.autoloco.profile import (
    CONSISTENT,
    MODERATE,
    SEVERE,
    SUPPORTING,
    Profile,
    Statistics,
    classify,
    measure,
)
from composer_replication.diloco.round_record import RoundRecord

__all__ = ["FLOORS", "alarms", "noise", "statistics_of"]

FLOORS = (0.05, 0.10, 0.15, 0.20)
_LIFE = 12  # intervals that a profile is asked about: the controller makes a new one after each change of horizon


def statistics_of(run: Run) -> list[Statistics]:
    """Of each interval after the warm-up."""
    warm = run["policy"]["settings"].get("warmup_steps", 160)
    seen = [RoundRecord.from_json(one).observed for one in run["rounds"]]
    found = [measure(one.observation) for one in seen if one.observation is not None and one.position > warm]
    return [one for one in found if one is not None]


def noise(sequences: Iterable[Sequence[Statistics]]) -> tuple[float, float]:
    """Standard deviations of one interval's ln D - 2 ln(mass) and ln C, from differences between neighbours."""
    drift: list[float] = []
    shared: list[float] = []
    for sequence in sequences:
        for one, after in zip(sequence, sequence[1:], strict=False):
            drift.append(after.drift - one.drift)
            shared.append(after.coherence - one.coherence)
    return stdev(drift) / 2**0.5, stdev(shared) / 2**0.5


def alarms(sequences: Iterable[Sequence[Statistics]], floor: float) -> dict[str, float]:
    """Shares of the classes, for profiles begun at every interval: one makes the reference, three the residuals, and
    the next are assessed until a severe one."""
    config = AutoLoCoConfig(base_horizon=20, scale_floor=floor)
    counted: Counter[str] = Counter()
    for sequence in sequences:
        for begin in range(len(sequence) - 4):
            profile = Profile(needed=1)
            for number, seen in enumerate(sequence[begin : begin + 4 + _LIFE]):
                if number >= 4:
                    found = classify(config, profile.score(config, seen))
                    counted[found] += 1
                    if found == SEVERE:
                        break
                    if found == MODERATE:
                        continue
                profile = profile.learn(config, seen)
    total = sum(counted.values())
    return {name: counted[name] / total for name in (SUPPORTING, CONSISTENT, MODERATE, SEVERE)}
