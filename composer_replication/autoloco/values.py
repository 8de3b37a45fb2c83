"""The values that policies, the outer step and the rounds hand to one another.

Invariant: each is frozen, plain numbers only, and means the same on every replica.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Observation", "Plan", "Policy", "Preview"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """The learning rates that one replica's schedule holds in store, from its present position.

    `sums[i]` is the sum of the next `steps[i]` learning rates (the *learning-rate mass* of an
    interval of that length; paper, appendix B.2). Nothing beyond the budget is counted, so that the
    sums stop growing at `remaining`.
    """

    steps: tuple[int, ...]  # increasing, > 0; the policy's `grid`
    sums: tuple[float, ...]
    next_lr: float
    remaining: int | None = None  # inner steps left in the budget; None: no budget

    def mass(self, steps: int) -> float:
        """Sum of the next `steps` learning rates. `steps` must be in the grid or reach the budget's end."""
        index = bisect_left(self.steps, steps)
        if index == len(self.steps) or (
            self.steps[index] != steps and (self.remaining is None or steps < self.remaining)
        ):
            raise KeyError(f"the preview holds no sum for {steps} steps (grid {self.steps})")
        return self.sums[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a closed round knows about its interval: the only thing a policy ever sees.

    Every field is taken from what the round published, so that all replicas decide alike.
    """

    drift: float  # D: mean over the roster of the squared norm of the pseudo-gradient, before the codec
    mean_square_norm: float  # squared norm of the averaged pseudo-gradient, after the codec
    roster: int  # replicas averaged
    fleet: int  # replicas the run began with
    steps: int  # real inner steps, summed over the roster
    tokens: int | None  # non-padding input tokens, summed over the roster; None: not counted
    mass: float  # executed learning-rate mass, mean over the roster
    position: int  # inner steps of the run behind us, this interval's included
    truncated: bool  # this interval was cut short by the budget: it takes no part in control
    preview: Preview  # of the lowest continuing replica id, from the end of this interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One interval, decided before it starts."""

    horizon: int  # token-equivalent units (H^tok)
    steps: int  # inner steps to run (H^step); 0: the budget is used up
    reference_steps: int  # inner steps that one base horizon takes now (H^ref)
    mass: float  # previewed learning-rate mass of `steps`
    base_mass: float  # previewed learning-rate mass of `reference_steps`
    truncated: bool = False  # `steps` was cut to what the budget leaves
    phase: str = ""  # e.g. "warm-up", "calibrate", "monitor", "candidate"
    assessment: str = ""  # of the interval just closed; "" if it was not assessed
    action: str = ""  # what the policy did: "keep", "grow", "adopt", "reject", "reduce", ...


class Policy(Protocol):
    """Chooses how long the next interval is. Pure: states go in and come out, nothing is kept.

    States are frozen values with `to_dict()`; `state_from_dict` is its inverse and refuses an unknown version.
    """

    @property
    def name(self) -> str: ...

    @property
    def grid(self) -> tuple[int, ...]:
        """The step counts a `Preview` must hold sums for."""
        ...

    def settings(self) -> dict[str, Any]:
        """The policy's settings as plain JSON values; a fleet refuses members whose settings differ."""
        ...

    def start(self, preview: Preview) -> tuple[Any, Plan]: ...

    def advance(self, state: Any, seen: Observation) -> tuple[Any, Plan]: ...

    def state_from_dict(self, data: dict[str, Any]) -> Any: ...
