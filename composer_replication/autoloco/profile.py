"""What is usual at the accepted horizon, and how far an interval is from it (paper, appendices A.1 and A.2).

Invariant: logarithms only, and nothing in here is ever infinite or NaN.

The drift reference follows the learning rate: at a fixed horizon drift grows with the square of the
interval's learning-rate mass, so `drift` is stored as ln D - 2 ln(mass). Carrying the reference along
from one interval's mass to the next one's then changes nothing, and mass drops out of the residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite, log
from typing import Any

from composer_replication.autoloco.config import AutoLoCoConfig
from composer_replication.autoloco.means import mean
from composer_replication.autoloco.outer import EPSILON
from composer_replication.autoloco.values import Observation

__all__ = ["CONSISTENT", "MODERATE", "SEVERE", "SUPPORTING", "Profile", "Statistics", "classify", "measure"]

SUPPORTING, CONSISTENT, MODERATE, SEVERE = "supporting", "consistent", "moderate", "severe"

RESIDUALS_NEEDED = 3  # before anything is assessed

# Median absolute deviation to standard deviation, for a normal distribution.
_MAD_SCALE = 1.4826
# Logarithms are rounded to this: far below any effect, far above the last bit, in which mathematical
# libraries differ. Replicas on unlike machines so keep equal states.
_LOG_QUANTUM = 2.0**-24


def _ln(value: float) -> float | None:
    if not (isfinite(value) and value > 0.0):
        return None
    return round(log(value) / _LOG_QUANTUM) * _LOG_QUANTUM


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """The two statistics of one interval, as logarithms."""

    drift: float  # ln D - 2 ln(mass)
    coherence: float  # ln C, for the whole fleet


def coherence(seen: Observation) -> float:
    """C: 1 for unrelated updates, the number of replicas for identical ones (paper, appendix C.1).

    With a roster other than the fleet, the value that the same mean correlation between replicas would give
    for the whole fleet: (C - 1) / (N - 1) is that correlation, up to the replicas' unequal norms.
    """
    value = seen.roster * seen.mean_square_norm / (seen.drift + EPSILON)
    if seen.roster == seen.fleet:
        return value
    return 1.0 + (seen.fleet - 1) * (value - 1.0) / (seen.roster - 1)


def measure(seen: Observation) -> Statistics | None:
    """The statistics of an interval of two or more replicas; None if one isn't finite, or is zero."""
    assert seen.roster > 1, "a roster of one has no coherence"
    if not (isfinite(seen.drift) and isfinite(seen.mean_square_norm)):
        return None
    drift, mass, shared = _ln(seen.drift), _ln(seen.mass), _ln(coherence(seen))
    if drift is None or mass is None or shared is None:
        return None
    return Statistics(drift=drift - 2.0 * mass, coherence=shared)


def classify(config: AutoLoCoConfig, score: float) -> str:
    """The class of an adverse score (docs/method.md; the thresholds are choices)."""
    if score <= config.supporting_threshold:
        return SUPPORTING
    if score <= config.consistent_threshold:
        return CONSISTENT
    return MODERATE if score <= config.moderate_threshold else SEVERE


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The reference at one horizon and the residuals around it; empty at first, ready after a few intervals."""

    needed: int  # intervals that the reference is made from
    initial: tuple[Statistics, ...] = ()  # ... those seen so far; emptied when the reference exists
    reference: Statistics | None = None
    drift_residuals: tuple[float, ...] = ()
    coherence_residuals: tuple[float, ...] = ()

    @property
    def ready(self) -> bool:
        return len(self.drift_residuals) >= RESIDUALS_NEEDED

    def learn(self, config: AutoLoCoConfig, seen: Statistics) -> Profile:
        """Take in one interval: towards the reference while there is none, then as a residual.

        A residual is measured from the references as they were; they move after it (log-space moving average).
        """
        if self.reference is None:
            initial = (*self.initial, seen)
            if len(initial) < self.needed:
                return replace(self, initial=initial)
            reference = Statistics(
                drift=mean(one.drift for one in initial),
                coherence=mean(one.coherence for one in initial),
            )
            return replace(self, initial=(), reference=reference)
        drift, shared = seen.drift - self.reference.drift, seen.coherence - self.reference.coherence
        weight = config.reference_weight
        return replace(
            self,
            drift_residuals=(*self.drift_residuals, drift)[-config.history :],
            coherence_residuals=(*self.coherence_residuals, shared)[-config.history :],
            reference=Statistics(
                drift=self.reference.drift + weight * drift, coherence=self.reference.coherence + weight * shared
            ),
        )

    def score(self, config: AutoLoCoConfig, seen: Statistics) -> float:
        """How far the interval is off on the bad side: more drift or less coherence than usual, in scales."""
        assert self.reference is not None and self.ready, "nothing to compare with yet"
        scores: list[float] = []
        for residual, history, sign in (
            (seen.drift - self.reference.drift, self.drift_residuals, 1.0),
            (seen.coherence - self.reference.coherence, self.coherence_residuals, -1.0),
        ):
            centre = _median(history)
            scale = max(_MAD_SCALE * _median([abs(one - centre) for one in history]), config.scale_floor)
            scores.append(sign * (residual - centre) / scale)
        return max(scores)

    def to_dict(self) -> dict[str, Any]:
        return {
            "needed": self.needed,
            "initial": [[one.drift, one.coherence] for one in self.initial],
            "reference": None if self.reference is None else [self.reference.drift, self.reference.coherence],
            "drift_residuals": list(self.drift_residuals),
            "coherence_residuals": list(self.coherence_residuals),
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Profile:
        def statistics(pair: Sequence[float]) -> Statistics:
            return Statistics(drift=float(pair[0]), coherence=float(pair[1]))

        reference = data["reference"]
        return Profile(
            needed=int(data["needed"]),
            initial=tuple(statistics(pair) for pair in data["initial"]),
            reference=None if reference is None else statistics(reference),
            drift_residuals=tuple(float(one) for one in data["drift_residuals"]),
            coherence_residuals=tuple(float(one) for one in data["coherence_residuals"]),
        )
