"""Who decides how long the next interval is: the fixed interval (DiLoCo), AutoLoCo, QSR, linear, staircase.

Invariant: every policy is a frozen value and a pure function of (state, observation). Only AutoLoCo maps
horizons through the token density; the others count inner steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import floor, isfinite, sqrt
from typing import Any

from composer_replication.autoloco import controller
from composer_replication.autoloco.config import AutoLoCoConfig
from composer_replication.autoloco.controller import AutoLoCoState
from composer_replication.autoloco.profile import Statistics
from composer_replication.autoloco.values import Observation, Plan, Policy, Preview

__all__ = [
    "POLICIES",
    "AutoLoCoPolicy",
    "FixedPolicy",
    "LinearPolicy",
    "QSRPolicy",
    "StaircasePolicy",
    "StepState",
    "make_policy",
]

STEP_STATE_VERSION = 1


def _cut(steps: int, preview: Preview) -> tuple[int, bool]:
    """(steps, truncated): no interval outlasts the budget."""
    if preview.remaining is None or steps <= preview.remaining:
        return steps, False
    return preview.remaining, True


@dataclass(frozen=True, kw_only=True)
class AutoLoCoPolicy:
    """The adaptive horizon of the paper (section 3.1, appendix A)."""

    config: AutoLoCoConfig

    @property
    def name(self) -> str:
        return "autoloco"

    @property
    def grid(self) -> tuple[int, ...]:
        return self.config.grid

    def settings(self) -> dict[str, Any]:
        return {"policy": self.name, **self.config.settings()}

    def start(self, preview: Preview) -> tuple[AutoLoCoState, Plan]:
        state = controller.initial_state(self.config)
        return state, self._plan(state, preview)

    def advance(self, state: AutoLoCoState, seen: Observation) -> tuple[AutoLoCoState, Plan]:
        state, assessment, action = controller.advance(self.config, state, seen)
        return state, self._plan(state, seen.preview, assessment, action)

    def state_from_dict(self, data: dict[str, Any]) -> AutoLoCoState:
        return AutoLoCoState.from_dict(data)

    def _plan(self, state: AutoLoCoState, preview: Preview, assessment: str = "", action: str = "") -> Plan:
        steps, truncated = _cut(state.tokens.steps(self.config, state.horizon), preview)
        reference, _ = _cut(state.tokens.steps(self.config, self.config.base_horizon), preview)
        return Plan(
            horizon=state.horizon,
            steps=steps,
            reference_steps=reference,
            mass=preview.mass(steps),
            base_mass=preview.mass(reference),
            truncated=truncated,
            phase=state.phase,
            assessment=assessment,
            action=action,
        )


@dataclass(frozen=True, kw_only=True)
class StaircasePolicy(AutoLoCoPolicy):
    """AutoLoCo's growth with no classifier, as a control: every interval supports an increase; no token mapping."""

    @property
    def name(self) -> str:
        return "staircase"

    def advance(self, state: AutoLoCoState, seen: Observation) -> tuple[AutoLoCoState, Plan]:
        # Nothing is measured, so a roster of one will do as well.
        unmeasured = replace(seen, tokens=None, roster=max(2, seen.roster))
        state, assessment, action = controller.advance(self.config, state, unmeasured, _nothing_unusual)
        return state, self._plan(state, seen.preview, assessment, action)


def _nothing_unusual(_: Observation) -> Statistics:
    return Statistics(drift=0.0, coherence=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """State of the policies that only count: whole intervals behind us."""

    intervals: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {"version": STEP_STATE_VERSION, "intervals": self.intervals}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> StepState:
        """Inverse of `to_dict`. Raises ValueError on another version or a missing count."""
        if data.get("version") != STEP_STATE_VERSION or not isinstance(data.get("intervals"), int):
            raise ValueError(f"policy state can't be read: {data!r} (this package reads version {STEP_STATE_VERSION})")
        return StepState(intervals=data["intervals"])


class _StepPolicy:
    """What the step-counting policies share. Their interval is its own reference: rho is 1 throughout.

    They don't use learning-rate masses; a plan's two masses are equal, and exact where the grid has the steps.
    """

    def horizon_at(self, position: int, intervals: int, preview: Preview) -> int:
        """The wanted length of the interval that starts at inner step `position`, `intervals` whole ones in."""
        raise AssertionError("each policy has its own")

    def start(self, preview: Preview) -> tuple[StepState, Plan]:
        state = StepState()
        return state, self._plan(0, state, preview, "")

    def advance(self, state: StepState, seen: Observation) -> tuple[StepState, Plan]:
        if not seen.truncated:
            state = StepState(intervals=state.intervals + 1)
        return state, self._plan(seen.position, state, seen.preview, "keep")

    def state_from_dict(self, data: dict[str, Any]) -> StepState:
        return StepState.from_dict(data)

    def _plan(self, position: int, state: StepState, preview: Preview, action: str) -> Plan:
        horizon = self.horizon_at(position, state.intervals, preview)
        steps, truncated = _cut(horizon, preview)
        mass = _known_mass(preview, steps)
        return Plan(
            horizon=horizon,
            steps=steps,
            reference_steps=steps,
            mass=mass,
            base_mass=mass,
            truncated=truncated,
            phase="steps",
            action=action,
        )


def _known_mass(preview: Preview, steps: int) -> float:
    try:
        return preview.mass(steps)
    except KeyError:
        return steps * preview.next_lr


@dataclass(frozen=True, kw_only=True)
class FixedPolicy(_StepPolicy):
    """DiLoCo's fixed interval."""

    horizon: int

    def __post_init__(self) -> None:
        _check_positive("horizon", self.horizon)

    @property
    def name(self) -> str:
        return "fixed"

    @property
    def grid(self) -> tuple[int, ...]:
        return (self.horizon,)

    def settings(self) -> dict[str, Any]:
        return {"policy": self.name, "horizon": self.horizon}

    def horizon_at(self, position: int, intervals: int, preview: Preview) -> int:
        return self.horizon


@dataclass(frozen=True, kw_only=True)
class QSRPolicy(_StepPolicy):
    """The quadratic rule: max(base, floor((alpha / lr)^2)), lr that of the interval's first step (paper, E.2).

    `alpha` is a setting; left out, it is sqrt(base_horizon) * peak_lr, which makes the rule start at the
    base horizon. The base horizon is kept until `warmup_steps` are done. At a learning rate of zero the rule
    has no finite answer: the rest of the budget is one interval or, without a budget, the base horizon.
    """

    base_horizon: int
    warmup_steps: int = 0
    alpha: float | None = None
    peak_lr: float | None = None

    def __post_init__(self) -> None:
        _check_positive("base_horizon", self.base_horizon)
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0, not {self.warmup_steps!r}")
        if self.alpha is None and self.peak_lr is None:
            raise ValueError("policy 'qsr' needs alpha, or peak_lr (the highest inner learning rate) to derive it from")
        for field, value in (("alpha", self.alpha), ("peak_lr", self.peak_lr)):
            if value is not None and not (isfinite(value) and value > 0.0):
                raise ValueError(f"{field} must be a positive number, not {value!r}")

    @property
    def name(self) -> str:
        return "qsr"

    @property
    def grid(self) -> tuple[int, ...]:
        return (self.base_horizon,)

    @property
    def coefficient(self) -> float:
        """The alpha in force."""
        if self.alpha is not None:
            return self.alpha
        assert self.peak_lr is not None
        return sqrt(self.base_horizon) * self.peak_lr

    def settings(self) -> dict[str, Any]:
        return {
            "policy": self.name,
            "base_horizon": self.base_horizon,
            "warmup_steps": self.warmup_steps,
            "alpha": self.coefficient,
        }

    def horizon_at(self, position: int, intervals: int, preview: Preview) -> int:
        if position < self.warmup_steps:
            return self.base_horizon
        ratio = self.coefficient / preview.next_lr if preview.next_lr > 0.0 else float("inf")
        square = ratio * ratio
        if not isfinite(square):
            return max(self.base_horizon, preview.remaining or 0)
        return max(self.base_horizon, floor(square))


@dataclass(frozen=True, kw_only=True)
class LinearPolicy(_StepPolicy):
    """Intervals of increment, 2 * increment, 3 * increment, ... steps; the budget's remainder at the end."""

    increment: int = 10

    def __post_init__(self) -> None:
        _check_positive("increment", self.increment)

    @property
    def name(self) -> str:
        return "linear"

    @property
    def grid(self) -> tuple[int, ...]:
        return (self.increment,)

    def settings(self) -> dict[str, Any]:
        return {"policy": self.name, "increment": self.increment}

    def horizon_at(self, position: int, intervals: int, preview: Preview) -> int:
        return self.increment * (intervals + 1)


def _check_positive(field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{field} must be a whole number of at least 1, not {value!r}")


def _autoloco(config: AutoLoCoConfig) -> Policy:
    return AutoLoCoPolicy(config=config)


def _fixed(config: AutoLoCoConfig) -> Policy:
    return FixedPolicy(horizon=config.base_horizon)


def _qsr(config: AutoLoCoConfig, alpha: float | None = None, peak_lr: float | None = None) -> Policy:
    return QSRPolicy(base_horizon=config.base_horizon, warmup_steps=config.warmup_steps, alpha=alpha, peak_lr=peak_lr)


def _linear(_: AutoLoCoConfig, increment: int = 10) -> Policy:
    return LinearPolicy(increment=increment)


def _staircase(config: AutoLoCoConfig) -> Policy:
    return StaircasePolicy(config=config)


_MAKERS: dict[str, tuple[Callable[..., Policy], frozenset[str]]] = {
    "autoloco": (_autoloco, frozenset()),
    "fixed": (_fixed, frozenset()),
    "linear": (_linear, frozenset({"increment"})),
    "qsr": (_qsr, frozenset({"alpha", "peak_lr"})),
    "staircase": (_staircase, frozenset()),
}

POLICIES: tuple[str, ...] = tuple(_MAKERS)


def make_policy(name: str, config: AutoLoCoConfig, **options: Any) -> Policy:
    """The policy of that name. `config` gives the horizons and the warm-up; `options` are the policy's own:
    `alpha` and `peak_lr` for "qsr", `increment` for "linear".

    Raises ValueError for an unknown name or option (naming the nearest) or a bad value.
    """
    if name not in _MAKERS:
        close = get_close_matches(name, POLICIES, n=1) or (["fixed"] if "diloco" in name.lower() else [])
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"there is no policy {name!r} (there are {', '.join(POLICIES)}){hint}")
    maker, known = _MAKERS[name]
    for option in options:
        if option not in known:
            has = f"its options: {', '.join(sorted(known))}" if known else "it has none"
            raise ValueError(f"policy {name!r} has no option {option!r} ({has})")
    return maker(config, **options)
