"""What a closed round tells people and adapters: plain values, no behaviour but naming."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from composer_replication.autoloco.values import Observation, Plan

__all__ = ["FinalSummary", "RoundSummary", "StartSummary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSummary:
    """How this replica came in."""

    round: int
    position: int  # inner steps that the fleet has behind it
    resumed: bool  # from this replica's own checkpoint
    fast_forward: int  # inner steps of the fleet that this replica has not trained: step the schedulers that often


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSummary:
    """One closed round, as this replica saw it."""

    round: int
    included: bool  # this replica's pseudo-gradient is in the mean
    members: tuple[int, ...]
    absent: Mapping[int, str]
    outliers: Mapping[int, str]  # replicas whose norms stuck out in this round, and what was done
    steps: int  # inner steps of the interval, by plan
    horizon: int
    tokens: int | None  # of the whole roster
    position: int  # inner steps of the fleet behind us now
    rho: float
    momentum: float
    outer_lr: float
    drift: float  # D
    mean_square_norm: float
    pseudo_gradient_norm: float  # this replica's own
    phase: str
    assessment: str
    action: str
    next_plan: Plan
    fast_forward: int
    restored: bool  # own pseudo-gradient wasn't finite: the anchor was restored, inner optimizer state needs repair
    wait_seconds: float
    exchange_seconds: float  # whole round, waiting included
    phase_seconds: Mapping[str, float]
    bytes_sent: int
    bytes_received: int
    ended: bool
    lateness: Mapping[int, float] = field(default_factory=dict[int, float])
    # ^ seconds after this replica's own contribution at which each other one's was there, of those that took part
    member_metrics: Mapping[int, Mapping[str, float]] = field(default_factory=dict[int, Mapping[str, float]])
    observation: Observation | None = None  # what the policy saw; None when no replica goes on

    @property
    def coherence(self) -> float:
        """C = N |mean|² / D, between 0 and N (paper, appendix C.1)."""
        return len(self.members) * self.mean_square_norm / self.drift if self.drift > 0 else math.nan

    @property
    def straggler(self) -> tuple[int, float] | None:
        """Who came last, and how many seconds after this replica's own contribution; None if nobody came after it."""
        return max(self.lateness.items(), key=lambda item: (item[1], -item[0]), default=None)

    def metrics(self) -> dict[str, float]:
        """For loggers; values that don't exist in this round are left out."""
        values = {
            "round": self.round,
            "horizon": self.horizon,
            "interval_steps": self.steps,
            "interval_tokens": self.tokens,
            "position": self.position,
            "replicas": len(self.members),
            "included": float(self.included),
            "outliers": len(self.outliers),
            "rho": self.rho,
            "outer_momentum": self.momentum,
            "outer_lr": self.outer_lr,
            "drift": self.drift,
            "coherence": self.coherence,
            "pseudo_gradient_norm": self.pseudo_gradient_norm,
            "straggler": None if self.straggler is None else self.straggler[0],
            "straggler_seconds": None if self.straggler is None else self.straggler[1],
            "wait_seconds": self.wait_seconds,
            "exchange_seconds": self.exchange_seconds,
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
        }
        return {f"autoloco/{name}": float(v) for name, v in values.items() if v is not None and math.isfinite(v)}


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalSummary:
    """How the run ended here."""

    rounds: int
    position: int
    digest: str  # of the final shared state
    wait_seconds: float
    bytes_sent: int
    bytes_received: int
    intervals_lost: int  # of this replica: decided without it, or not finite
