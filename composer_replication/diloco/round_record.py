"""A closed round as plain JSON, and the replay that makes it from what the round observed.

Invariant: `replay` asks the policy that trained. From the same observations it gives the same intervals, assessments
and outer coefficients on any machine, to the last bit; what a record says was decided can be checked by anyone.

One record is one line of JSON; docs/report.md names every field and its unit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from composer_replication.autoloco.config import OuterConfig
from composer_replication.autoloco.outer import outer_coefficients
from composer_replication.autoloco.values import Observation, Plan, Policy, Preview
from composer_replication.diloco.summary import RoundSummary
from composer_replication.diloco.told import of_interval

__all__ = ["RECORD_VERSION", "Observed", "RoundRecord", "record_of", "replay", "told_before"]

RECORD_VERSION = 2
_TOLD_LATER = ("wait_seconds", "exchange_seconds", "bytes_sent", "bytes_received")


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What is known of a closed round without asking the policy."""

    round: int
    position: int  # inner steps of the run behind it
    members: tuple[int, ...]
    observation: Observation | None  # None where no replica went on
    steps: int  # of the interval, as planned
    tokens: int | None = None  # of the whole roster
    drift: float = math.nan  # where there is no observation
    mean_square_norm: float = math.nan
    absent: Mapping[int, str] = field(default_factory=dict[int, str])
    outliers: Mapping[int, str] = field(default_factory=dict[int, str])
    replicas: Mapping[int, Mapping[str, float]] = field(default_factory=dict[int, Mapping[str, float]])


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One closed round: what was observed, how it was assessed, and what was decided."""

    observed: Observed
    horizon: int  # in token-equivalent steps
    rho: float
    momentum: float
    outer_lr: float
    phase: str  # of the controller, after this round
    assessment: str  # of this round's interval; "" if it wasn't assessed
    action: str
    next_horizon: int
    next_steps: int

    @property
    def round(self) -> int:
        return self.observed.round

    @property
    def steps(self) -> int:
        return self.observed.steps

    @property
    def position(self) -> int:
        return self.observed.position

    @property
    def loss(self) -> float | None:
        """Mean over those that were averaged, over the interval; None if nobody told one."""
        told = [self.observed.replicas.get(replica, {}).get("loss") for replica in self.observed.members]
        losses = [loss for loss in told if loss is not None and math.isfinite(loss)]
        return sum(losses) / len(losses) if losses else None

    @property
    def drift(self) -> float:
        seen = self.observed.observation
        return self.observed.drift if seen is None else seen.drift

    @property
    def mean_square_norm(self) -> float:
        seen = self.observed.observation
        return self.observed.mean_square_norm if seen is None else seen.mean_square_norm

    @property
    def coherence(self) -> float:
        """C = N |mean|² / D (paper, appendix C.1)."""
        drift = self.drift
        return len(self.observed.members) * self.mean_square_norm / drift if drift > 0 else math.nan

    def to_json(self) -> dict[str, Any]:
        """Plain values; what isn't finite is null."""
        seen = self.observed
        return {
            "version": RECORD_VERSION,
            "round": seen.round,
            "steps": seen.steps,
            "position": seen.position,
            "horizon": self.horizon,
            "members": list(seen.members),
            "absent": {str(replica): why for replica, why in sorted(seen.absent.items())},
            "outliers": {str(replica): what for replica, what in sorted(seen.outliers.items())},
            "tokens": seen.tokens,
            "loss": self.loss,
            "rho": self.rho,
            "momentum": self.momentum,
            "outer_lr": self.outer_lr,
            "drift": _finite(self.drift),
            "mean_square_norm": _finite(self.mean_square_norm),
            "coherence": _finite(self.coherence),
            "phase": self.phase,
            "assessment": self.assessment,
            "action": self.action,
            "next_horizon": self.next_horizon,
            "next_steps": self.next_steps,
            "replicas": {
                str(replica): {name: value for name, value in told.items() if math.isfinite(value)}
                for replica, told in sorted(seen.replicas.items())
            },
            "observation": None if seen.observation is None else _observation_to_json(seen.observation),
        }

    def to_line(self) -> str:
        return json.dumps(self.to_json(), allow_nan=False) + "\n"

    @staticmethod
    def from_json(data: Any) -> RoundRecord:
        """Inverse of `to_json`. Raises ValueError for another version, or for a record that lacks a field."""
        if not isinstance(data, dict):
            raise ValueError(f"a round's record is a JSON object, not {type(data).__name__}")
        if data.get("version") != RECORD_VERSION:
            raise ValueError(f"a round's record of version {data.get('version')}, this package reads {RECORD_VERSION}")
        try:
            return _record(data)
        except KeyError as error:
            raise ValueError(f"a round's record lacks {error}") from error
        except (AttributeError, TypeError) as error:
            raise ValueError(f"a round's record has a field of the wrong kind: {error}") from error


def record_of(summary: RoundSummary) -> RoundRecord:
    """The record of a round as one replica saw it; of the other replicas it holds what they told."""
    told = {replica: of_interval(metrics) for replica, metrics in summary.member_metrics.items()}
    return RoundRecord(
        observed=Observed(
            round=summary.round,
            position=summary.position,
            members=summary.members,
            observation=summary.observation,
            steps=summary.steps,
            tokens=summary.tokens,
            mean_square_norm=summary.mean_square_norm,
            absent=dict(summary.absent),
            outliers=dict(summary.outliers),
            replicas=told,
        ),
        horizon=summary.horizon,
        rho=summary.rho,
        momentum=summary.momentum,
        outer_lr=summary.outer_lr,
        phase=summary.phase,
        assessment=summary.assessment,
        action=summary.action,
        next_horizon=summary.next_plan.horizon,
        next_steps=summary.next_plan.steps,
    )


def replay(
    policy: Policy, outer: OuterConfig, rounds: Iterable[Observed], *, first: Preview | None = None
) -> list[RoundRecord]:
    """What `policy` decides on these rounds, one after another, from a run's first on.

    `outer` may be unresolved. `first` is the preview from which the first interval was planned; without it the
    interval's own learning rates stand for it, which is exact where the policy begins at its base horizon. After a
    round that nobody went on from, the policy is asked no more.
    """
    settings = outer.resolved(policy.name)
    records: list[RoundRecord] = []
    state: Any = None
    plan: Plan | None = None
    for seen in rounds:
        if plan is None:
            state, plan = policy.start(first or _as_executed(policy.grid, seen))
        outer_step = outer_coefficients(settings, settings.momentum or 0.0, plan.mass, plan.base_mass)
        horizon = plan.horizon
        if seen.observation is not None:
            state, plan = policy.advance(state, seen.observation)
        records.append(
            RoundRecord(
                observed=seen,
                horizon=horizon,
                rho=outer_step.rho,
                momentum=outer_step.momentum,
                outer_lr=outer_step.lr,
                phase=plan.phase,
                assessment=plan.assessment,
                action=plan.action,
                next_horizon=plan.horizon,
                next_steps=plan.steps,
            )
        )
    return records


def _as_executed(grid: Sequence[int], seen: Observed) -> Preview:
    """The first interval's mean rate, held."""
    mass = seen.observation.mass if seen.observation is not None else math.nan
    rate = mass / seen.steps if seen.steps and math.isfinite(mass) else 1.0
    return Preview(steps=tuple(grid), sums=tuple(rate * steps for steps in grid), next_lr=rate)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def told_before(metrics: Mapping[str, float]) -> dict[str, float]:
    """What a replica's report says of the round before its own: waiting, exchange, bytes."""
    return {name: metrics[f"last_{name}"] for name in _TOLD_LATER if f"last_{name}" in metrics}


def _observation_to_json(seen: Observation) -> dict[str, Any]:
    values = asdict(seen)
    for name in ("drift", "mean_square_norm", "mass"):
        values[name] = _finite(values[name])
    return values


def _observation(data: Mapping[str, Any]) -> Observation:
    preview = data["preview"]
    values = {name: value for name, value in data.items() if name != "preview"}
    for name in ("drift", "mean_square_norm", "mass"):
        values[name] = _number(values[name])
    return Observation(
        **values,
        preview=Preview(
            steps=tuple(preview["steps"]),
            sums=tuple(preview["sums"]),
            next_lr=preview["next_lr"],
            remaining=preview["remaining"],
        ),
    )


def _record(data: Mapping[str, Any]) -> RoundRecord:
    seen = data["observation"]
    observed = Observed(
        round=data["round"],
        position=data["position"],
        members=tuple(data["members"]),
        observation=None if seen is None else _observation(seen),
        steps=data["steps"],
        tokens=data["tokens"],
        drift=_number(data["drift"]),
        mean_square_norm=_number(data["mean_square_norm"]),
        absent={int(replica): why for replica, why in data["absent"].items()},
        outliers={int(replica): what for replica, what in data["outliers"].items()},
        replicas={int(replica): dict(told) for replica, told in data["replicas"].items()},
    )
    names = ("horizon", "rho", "momentum", "outer_lr", "phase", "assessment", "action", "next_horizon", "next_steps")
    return RoundRecord(observed=observed, **{name: data[name] for name in names})
