"""Observations for tests: a made-up fleet at a constant learning rate."""

from __future__ import annotations

from typing import Any

from composer_replication.autoloco import Observation, Plan, Preview


def preview(grid: tuple[int, ...], lr: float = 1.0, remaining: int | None = None) -> Preview:
    inside = [steps if remaining is None else min(steps, remaining) for steps in grid]
    return Preview(steps=grid, sums=tuple(lr * steps for steps in inside), next_lr=lr, remaining=remaining)


def observation(grid: tuple[int, ...] = (1,), **given: Any) -> Observation:
    """Four replicas, 30 steps at rate 1, drift as usual and coherence 2, unless `given` says otherwise."""
    values: dict[str, Any] = {
        "drift": 900.0,
        "mean_square_norm": 450.0,
        "roster": 4,
        "fleet": 4,
        "steps": 120,
        "tokens": None,
        "mass": 30.0,
        "position": 0,
        "truncated": False,
        "preview": preview(grid),
    }
    return Observation(**{**values, **given})


def of_plan(
    plan: Plan,
    grid: tuple[int, ...],
    *,
    position: int,
    lr: float = 1.0,
    next_lr: float | None = None,
    remaining: int | None = None,
    drift: float = 1.0,
    coherence: float = 2.0,
    roster: int = 4,
    fleet: int = 4,
    density: float | None = None,
) -> Observation:
    """The interval that `plan` asked for, run at rate `lr`; `drift` is relative to the squared mass."""
    mass = plan.steps * lr
    return Observation(
        drift=drift * mass * mass,
        mean_square_norm=coherence * drift * mass * mass / roster,
        roster=roster,
        fleet=fleet,
        steps=plan.steps * roster,
        tokens=None if density is None else round(density * plan.steps * roster),
        mass=mass,
        position=position + plan.steps,
        truncated=plan.truncated,
        preview=preview(grid, lr if next_lr is None else next_lr, remaining),
    )
