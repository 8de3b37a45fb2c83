"""The horizon controller: (config, state, observation) -> (state, assessment, action). A pure state machine.

Invariant: `accepted` and `horizon` are admissible at all times; they differ only while a longer
candidate is tried. Paper: appendices A.1, A.2, A.3; what it leaves open is settled in docs/method.md.

    warm-up -> calibrate -> monitor <-> candidate -> confirm
                               ^            |           |
                               '---- re-estimate <------'   after every change of the accepted horizon
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from typing import Any

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
from composer_replication.autoloco.tokens import TokenMapper, nearest
from composer_replication.autoloco.values import Observation, Preview

__all__ = ["AutoLoCoState", "Bound", "advance", "initial_state"]

STATE_VERSION = 1

WARM_UP, CALIBRATE, RE_ESTIMATE = "warm-up", "calibrate", "re-estimate"
MONITOR, CANDIDATE, CONFIRM = "monitor", "candidate", "confirm"
PHASES = (WARM_UP, CALIBRATE, RE_ESTIMATE, MONITOR, CANDIDATE, CONFIRM)

CALIBRATION_INTERVALS, RE_ESTIMATION_INTERVALS = 2, 1  # that make a reference
MODERATES_TO_REDUCE = 2  # in a row
SEVERES_TO_FALL_BACK = 3  # since the last interval that was as it should be


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A horizon that was tried and rejected, and the learning-rate mass it had then."""

    horizon: int
    mass: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoLoCoState:
    """All that the controller remembers from one interval to the next."""

    phase: str
    accepted: int  # the horizon in force
    horizon: int  # the horizon of the interval that runs now
    profile: Profile  # of the accepted horizon
    tokens: TokenMapper
    moderates: int = 0  # in a row, at the accepted horizon
    severes: int = 0  # since the last supporting or consistent interval
    bound: Bound | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "phase": self.phase,
            "accepted": self.accepted,
            "horizon": self.horizon,
            "profile": self.profile.to_dict(),
            "tokens": self.tokens.to_dict(),
            "moderates": self.moderates,
            "severes": self.severes,
            "bound": None if self.bound is None else {"horizon": self.bound.horizon, "mass": self.bound.mass},
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> AutoLoCoState:
        """Inverse of `to_dict`. Raises ValueError on another version or on anything missing or malformed."""
        if data.get("version") != STATE_VERSION:
            raise ValueError(
                f"controller state has version {data.get('version')!r}, this package reads {STATE_VERSION}"
            )
        try:
            bound = data["bound"]
            state = AutoLoCoState(
                phase=str(data["phase"]),
                accepted=int(data["accepted"]),
                horizon=int(data["horizon"]),
                profile=Profile.from_dict(data["profile"]),
                tokens=TokenMapper.from_dict(data["tokens"]),
                moderates=int(data["moderates"]),
                severes=int(data["severes"]),
                bound=None if bound is None else Bound(horizon=int(bound["horizon"]), mass=float(bound["mass"])),
            )
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"controller state can't be read: {error!r}") from error
        if state.phase not in PHASES:
            raise ValueError(f"controller state has the unknown phase {state.phase!r}")
        return state


def initial_state(config: AutoLoCoConfig) -> AutoLoCoState:
    return AutoLoCoState(
        phase=WARM_UP if config.warmup_steps else CALIBRATE,
        accepted=config.base_horizon,
        horizon=config.base_horizon,
        profile=Profile(needed=CALIBRATION_INTERVALS),
        tokens=TokenMapper(),
    )


def advance(
    config: AutoLoCoConfig,
    state: AutoLoCoState,
    seen: Observation,
    statistics_of: Callable[[Observation], Statistics | None] = measure,
) -> tuple[AutoLoCoState, str, str]:
    """Take in one closed interval; the new state, the interval's assessment ("" if none) and what was done."""
    if seen.truncated:
        # The budget is used up. Should it be raised later, a trial that was cut off is not resumed.
        if state.phase in (CANDIDATE, CONFIRM):
            state = replace(state, phase=MONITOR, horizon=state.accepted)
        return state, "", "keep"
    state = replace(state, tokens=state.tokens.observe(config, seen, at_base=state.horizon == config.base_horizon))
    if state.phase == WARM_UP and seen.position >= config.warmup_steps:
        state = replace(state, phase=CALIBRATE)
    if state.phase == WARM_UP or seen.roster < 2:
        return state, "", "keep"

    statistics = statistics_of(seen)
    if state.phase == CALIBRATE or (state.phase == RE_ESTIMATE and statistics is not None):
        return _learn(config, state, statistics), "", "keep"
    if statistics is None:
        assessment = SEVERE
    else:
        assessment = classify(config, state.profile.score(config, statistics))
    good = assessment in (SUPPORTING, CONSISTENT)
    state = replace(state, severes=0 if good else state.severes + (assessment == SEVERE))

    if state.phase in (CANDIDATE, CONFIRM):
        state, action = _judge_candidate(config, state, seen, statistics, assessment)
    else:
        state, action = _monitor(config, state, seen, statistics, assessment)
    return state, assessment, action


def _learn(config: AutoLoCoConfig, state: AutoLoCoState, statistics: Statistics | None) -> AutoLoCoState:
    """Calibration and re-estimation: nothing is assessed; an interval that isn't finite doesn't count."""
    if statistics is None:
        return state
    profile = state.profile.learn(config, statistics)
    return replace(state, profile=profile, phase=MONITOR if profile.ready else state.phase)


def _monitor(
    config: AutoLoCoConfig, state: AutoLoCoState, seen: Observation, statistics: Statistics | None, assessment: str
) -> tuple[AutoLoCoState, str]:
    """An assessed interval at the accepted horizon."""
    if assessment == SEVERE:
        return _reduce(config, state, config.severe_cut)
    if assessment == MODERATE:
        state = replace(state, moderates=state.moderates + 1)
        if state.moderates < MODERATES_TO_REDUCE:
            return state, "keep"
        return _reduce(config, state, config.moderate_cut)
    assert statistics is not None
    state = replace(state, moderates=0, profile=state.profile.learn(config, statistics))
    if assessment == CONSISTENT:
        return state, "keep"
    return _grow(config, state, seen.preview)


def _grow(config: AutoLoCoConfig, state: AutoLoCoState, preview: Preview) -> tuple[AutoLoCoState, str]:
    """Propose the longest horizon that the cap allows or, below a rejected bound, one near the midpoint.

    Below the base horizon the next longer one may always be tried, whatever the cap.
    """

    def exposure(horizon: int) -> float:
        return preview.mass(state.tokens.steps(config, horizon))

    bound = state.bound
    if bound is not None and exposure(bound.horizon) <= config.retire_ratio * bound.mass:
        bound = None
    cap = config.growth_cap * exposure(state.accepted)
    above = [horizon for horizon in config.horizons if horizon > state.accepted]
    longer = [horizon for horizon in above if exposure(horizon) <= cap]
    if not longer and state.accepted < config.base_horizon:
        # Of a short horizon one notch is more than the cap allows: what was cut could never come back to the base.
        longer = above[:1]
    if bound is not None:
        longer = [horizon for horizon in longer if horizon < bound.horizon]
    if not longer:
        return replace(state, bound=bound), "keep"
    proposed = longer[-1] if bound is None else nearest(longer, sqrt(state.accepted * bound.horizon))
    return replace(state, phase=CANDIDATE, horizon=proposed, bound=bound, moderates=0), "grow"


def _judge_candidate(
    config: AutoLoCoConfig, state: AutoLoCoState, seen: Observation, statistics: Statistics | None, assessment: str
) -> tuple[AutoLoCoState, str]:
    """An interval at a longer horizon, scored against the profile of the accepted one.

    A severe one counts towards the fallback but can't bring it about: the interval that led to the
    candidate supported an increase, and ended the count.
    """
    if assessment == CONSISTENT and state.phase == CANDIDATE:
        return replace(state, phase=CONFIRM), "confirm"
    if assessment in (SUPPORTING, CONSISTENT):
        assert statistics is not None
        state = _settle(config, state, state.horizon)
        # Its own interval is the first at the horizon that is used next.
        return replace(state, profile=state.profile.learn(config, statistics)), "adopt"
    mass = seen.mass if isfinite(seen.mass) else seen.preview.mass(state.tokens.steps(config, state.horizon))
    state = replace(state, bound=Bound(horizon=state.horizon, mass=mass))
    return _settle(config, state, state.accepted), "reject"


def _reduce(config: AutoLoCoConfig, state: AutoLoCoState, cut: float) -> tuple[AutoLoCoState, str]:
    """A shorter horizon: the admissible one nearest to the cut, or the shortest after repeated severe intervals."""
    shorter = [horizon for horizon in config.horizons if horizon < state.accepted]
    if not shorter:
        return _settle(config, state, state.accepted), "re-estimate"
    if state.severes >= SEVERES_TO_FALL_BACK:
        return _settle(config, state, shorter[0]), "fallback"
    return _settle(config, state, nearest(shorter, state.accepted / cut)), "reduce"


def _settle(config: AutoLoCoConfig, state: AutoLoCoState, horizon: int) -> AutoLoCoState:
    """Go on at `horizon` with an empty profile: one interval makes the reference, three give residuals."""
    bound = state.bound
    return replace(
        state,
        phase=RE_ESTIMATE,
        accepted=horizon,
        horizon=horizon,
        profile=Profile(needed=RE_ESTIMATION_INTERVALS),
        moderates=0,
        bound=bound if bound is not None and bound.horizon > horizon else None,
    )
