"""Which intervals would a policy run over a given learning-rate schedule, were nothing ever unusual?

Invariant: the policy that answers is the one that trains; only its observations are made up.

Convention for a learning-rate sequence: item s is the rate of inner step s, counted from 0. In warm-up it is
(s + 1) / warmup, so that the last warm-up step runs at the peak; after it the decay is a function of
(s - warmup) / (steps - warmup), which is 0 at the first step after warm-up and never reaches 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import cos, pi

from composer_replication.autoloco.values import Observation, Plan, Policy, Preview

__all__ = [
    "DECAYS",
    "ScheduleRun",
    "cosine_rates",
    "fixed_intervals",
    "linear_rates",
    "run_lengths",
    "run_schedule",
    "schedule_rates",
]


def _decaying(
    shape: Callable[[float], float], steps: int, warmup: int, final_fraction: float, peak: float
) -> tuple[float, ...]:
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps!r}")
    if not 0 <= warmup <= steps:
        raise ValueError(f"warmup must be between 0 and steps ({steps}), not {warmup!r}")
    if not 0.0 <= final_fraction <= 1.0:
        raise ValueError(f"final_fraction must be between 0 and 1, not {final_fraction!r}")
    if not 0.0 < peak < float("inf"):
        raise ValueError(f"peak must be a positive number, not {peak!r}")
    rising = [peak * (step + 1) / warmup for step in range(warmup)]
    falling = [
        peak * (final_fraction + (1.0 - final_fraction) * shape(step / (steps - warmup)))
        for step in range(steps - warmup)
    ]
    return (*rising, *falling)


def cosine_rates(steps: int, warmup: int = 0, final_fraction: float = 0.0, peak: float = 1.0) -> tuple[float, ...]:
    """Linear warm-up to `peak`, then a half cosine towards `final_fraction * peak`. One rate for each step."""
    return _decaying(lambda done: 0.5 * (1.0 + cos(pi * done)), steps, warmup, final_fraction, peak)


def linear_rates(steps: int, warmup: int = 0, final_fraction: float = 0.0, peak: float = 1.0) -> tuple[float, ...]:
    """Linear warm-up to `peak`, then a straight line towards `final_fraction * peak`. One rate for each step."""
    return _decaying(lambda done: 1.0 - done, steps, warmup, final_fraction, peak)


DECAYS: dict[str, Callable[..., tuple[float, ...]]] = {"cosine": cosine_rates, "linear": linear_rates}


def schedule_rates(
    decay: str, steps: int, warmup: int = 0, final_fraction: float = 0.0, peak: float = 1.0
) -> tuple[float, ...]:
    """The rates of the decay named ("cosine" or "linear"). Raises ValueError on another name or a bad number."""
    if decay not in DECAYS:
        raise ValueError(f"decay must be one of {', '.join(DECAYS)}, not {decay!r}")
    return DECAYS[decay](steps, warmup, final_fraction, peak)


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """The intervals in order."""

    plans: tuple[Plan, ...]

    @property
    def rounds(self) -> int:
        return len(self.plans)

    @property
    def steps(self) -> tuple[int, ...]:
        """Inner steps executed in each interval; they add up to the budget."""
        return tuple(plan.steps for plan in self.plans)

    @property
    def horizons(self) -> tuple[int, ...]:
        """The horizon wanted for each interval; the last may be cut short by the budget."""
        return tuple(plan.horizon for plan in self.plans)


def run_schedule(policy: Policy, rates: Sequence[float] | Callable[[int], float], steps: int) -> ScheduleRun:
    """Run `policy` for `steps` inner steps with the given learning rates (a sequence, or a function of the step).

    The observations are of a fleet whose drift grows as the learning rate says and whose coherence never
    changes, so that every interval that can be assessed supports an increase. Batches are equally full.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps!r}")
    sequence = [rates(step) for step in range(steps)] if callable(rates) else rates[:steps]
    if len(sequence) < steps:
        raise ValueError(f"rates must have one item for each of {steps} steps, not {len(sequence)}")
    masses = list(accumulate(sequence, initial=0.0))
    grid = policy.grid

    def preview(position: int) -> Preview:
        remaining = steps - position
        return Preview(
            steps=grid,
            sums=tuple(masses[position + min(length, remaining)] - masses[position] for length in grid),
            next_lr=sequence[position] if remaining else 0.0,
            remaining=remaining,
        )

    position = 0
    state, plan = policy.start(preview(position))
    plans: list[Plan] = []
    while plan.steps:
        plans.append(plan)
        mass = masses[position + plan.steps] - masses[position]
        position += plan.steps
        seen = Observation(
            drift=mass * mass,
            mean_square_norm=0.5 * mass * mass,
            roster=2,
            fleet=2,
            steps=2 * plan.steps,
            tokens=None,
            mass=mass,
            position=position,
            truncated=plan.truncated,
            preview=preview(position),
        )
        state, plan = policy.advance(state, seen)
    return ScheduleRun(tuple(plans))


def fixed_intervals(steps: int, horizon: int) -> int:
    """Intervals of `horizon` steps that `steps` are; the last of them may be cut short."""
    return -(-steps // horizon)


def run_lengths(values: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """(value, how often in a row) of each run: (500, 7), (550, 5), ..."""
    return tuple((value, sum(1 for _ in run)) for value, run in groupby(values))
