"""The horizon controller under made-up fleets: what must hold whatever is observed."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.autoloco import AutoLoCoConfig, AutoLoCoPolicy, AutoLoCoState, Observation, Plan
from tests.autoloco.observations import of_plan, preview

BASE = AutoLoCoPolicy(config=AutoLoCoConfig(base_horizon=30, horizon_step=1, scale_floor=0.05))


@dataclass(frozen=True)
class Interval:
    drift: float
    coherence: float
    roster: int
    density: float | None
    next_lr: float


ODD = [float("nan"), float("inf"), 0.0]
intervals = st.builds(
    Interval,
    drift=st.one_of(st.floats(0.9, 1.1), st.sampled_from([1.0, 1.0, 1.05, 1.1, 1.2, 1.6, *ODD])),
    coherence=st.one_of(st.floats(1.5, 2.5), st.sampled_from([2.0, 2.0, 2.0, 1.7, 0.2, *ODD])),
    roster=st.sampled_from([1, 3, 4, 4, 4, 4]),
    density=st.one_of(st.none(), st.floats(1.0, 1000.0)),
    next_lr=st.sampled_from([1.0, 1.0, 0.95, 0.8, 0.5, 0.0]),
)
# Long stretches of usual intervals, so that growth happens, with anything in between.
usual = Interval(drift=1.0, coherence=2.0, roster=4, density=None, next_lr=1.0)
histories = st.lists(st.one_of(st.just([usual] * 6), st.lists(intervals, min_size=1, max_size=3)), max_size=14).map(
    lambda parts: [one for part in parts for one in part]
)
configs = st.builds(
    AutoLoCoConfig,
    base_horizon=st.sampled_from([7, 30, 100]),
    min_horizon=st.sampled_from([None, 3]),
    horizon_step=st.sampled_from([None, 1, 4]),
    warmup_steps=st.sampled_from([0, 40]),
)


@dataclass(frozen=True)
class Turn:
    state: AutoLoCoState
    plan: Plan
    seen: Observation | None  # what led here


def run(config: AutoLoCoConfig, history: list[Interval], budget: int | None = None) -> list[Turn]:
    policy = AutoLoCoPolicy(config=config)
    state, plan = policy.start(preview(policy.grid, 1.0, budget))
    turns = [Turn(state, plan, None)]
    position, lr = 0, 1.0
    for one in history:
        if plan.steps == 0:
            break
        remaining = None if budget is None else budget - position - plan.steps
        seen = of_plan(
            plan,
            policy.grid,
            position=position,
            lr=lr,
            next_lr=one.next_lr,
            remaining=remaining,
            drift=one.drift,
            coherence=one.coherence,
            roster=one.roster,
            density=one.density,
        )
        position, lr = position + plan.steps, one.next_lr
        state, plan = policy.advance(state, seen)
        turns.append(Turn(state, plan, seen))
    return turns


@settings(max_examples=80, deadline=None)
@given(configs, histories)
def test_every_plan_is_admissible(config: AutoLoCoConfig, history: list[Interval]) -> None:
    for turn in run(config, history):
        assert turn.plan.horizon in config.horizons and turn.state.accepted in config.horizons
        assert turn.plan.steps in config.grid and turn.plan.reference_steps in config.grid
        assert turn.plan.horizon == turn.state.horizon and turn.plan.phase == turn.state.phase
        assert (turn.state.horizon > turn.state.accepted) == (turn.plan.phase in ("candidate", "confirm"))
        assert turn.state.bound is None or turn.state.bound.horizon > turn.state.accepted
        if turn.plan.horizon == config.base_horizon:
            assert (turn.plan.steps, turn.plan.mass) == (turn.plan.reference_steps, turn.plan.base_mass)


@settings(max_examples=80, deadline=None)
@given(configs, histories)
def test_growth_keeps_the_cap_and_stays_below_a_bound_until_it_is_retired(
    config: AutoLoCoConfig, history: list[Interval]
) -> None:
    turns = run(config, history)
    for before, after in zip(turns, turns[1:], strict=False):
        if after.plan.action != "grow":
            continue
        assert after.seen is not None and after.plan.assessment == "supporting"
        ahead, steps = after.seen.preview, after.state.tokens.steps
        accepted = ahead.mass(steps(config, after.state.accepted))
        assert after.plan.horizon > before.state.accepted == after.state.accepted
        notch = min(horizon for horizon in config.horizons if horizon > before.state.accepted)
        back = before.state.accepted < config.base_horizon and after.plan.horizon == notch
        assert after.plan.mass <= 1.15 * accepted or back
        bound = before.state.bound
        if bound is None:
            longer = [h for h in config.horizons if h > after.plan.horizon]
            assert all(ahead.mass(steps(config, h)) > 1.15 * accepted for h in longer)
        elif after.state.bound is None:
            assert ahead.mass(steps(config, bound.horizon)) <= 0.9 * bound.mass
        else:
            assert after.state.bound == bound and after.plan.horizon < bound.horizon
            assert ahead.mass(steps(config, bound.horizon)) > 0.9 * bound.mass


@settings(max_examples=80, deadline=None)
@given(configs, histories)
def test_after_any_change_one_three_and_one_intervals_pass_before_growth(
    config: AutoLoCoConfig, history: list[Interval]
) -> None:
    turns = run(config, history)
    since, changed_by = 0, "start"
    for before, after in zip(turns, turns[1:], strict=False):
        since += 1
        action = after.plan.action
        if action == "grow":
            assert since >= {"start": 6, "adopt": 4}.get(changed_by, 5)
        if action in ("adopt", "reject", "reduce", "fallback", "re-estimate"):
            since, changed_by = 0, action
        if after.state.accepted != before.state.accepted:
            assert action in ("adopt", "reduce", "fallback")
        if action in ("reduce", "fallback"):
            assert after.state.accepted < before.state.accepted
            assert after.plan.assessment in ("moderate", "severe")
        if after.plan.assessment == "severe":
            assert action in ("reduce", "fallback", "re-estimate", "reject")


@settings(max_examples=60, deadline=None)
@given(configs, histories, st.one_of(st.none(), st.integers(1, 2000)))
def test_a_run_that_goes_through_json_at_every_boundary_is_the_same_run(
    config: AutoLoCoConfig, history: list[Interval], budget: int | None
) -> None:
    policy = AutoLoCoPolicy(config=config)
    turns = run(config, history, budget)
    for before, after in zip(turns, turns[1:], strict=False):
        restored = policy.state_from_dict(json.loads(json.dumps(before.state.to_dict(), allow_nan=False)))
        assert restored == before.state
        assert after.seen is not None
        assert policy.advance(restored, after.seen) == (after.state, after.plan)


@settings(max_examples=60, deadline=None)
@given(configs, histories, st.integers(1, 700))
def test_the_budget_is_used_up_exactly(config: AutoLoCoConfig, history: list[Interval], budget: int) -> None:
    turns = run(config, history + [usual] * budget, budget)  # each takes a step or more
    assert turns[-1].plan.steps == 0
    assert sum(turn.plan.steps for turn in turns) == budget
    for turn in turns:
        assert turn.plan.truncated == (turn.plan.steps < turn.state.tokens.steps(config, turn.plan.horizon))
        assert turn.plan.base_mass <= 4 * config.longest


def monitored(policy: AutoLoCoPolicy = BASE) -> AutoLoCoState:
    state, plan = policy.start(preview(policy.grid))
    for number in range(5):
        state, plan = policy.advance(state, of_plan(plan, policy.grid, position=30 * number))
    assert state.phase == "monitor"
    return state


def step(state: AutoLoCoState, policy: AutoLoCoPolicy = BASE, **given: Any) -> tuple[AutoLoCoState, Plan]:
    plan = Plan(horizon=state.horizon, steps=state.horizon, reference_steps=30, mass=1.0, base_mass=1.0)
    return policy.advance(state, of_plan(plan, policy.grid, position=300, **given))


def test_calibration_takes_two_and_three_intervals_not_assessed() -> None:
    policy = BASE
    state, plan = policy.start(preview(policy.grid))
    for number, (initial, residuals) in enumerate([(1, 0), (0, 0), (0, 1), (0, 2), (0, 3)]):
        state, plan = policy.advance(state, of_plan(plan, policy.grid, position=30 * number, drift=9.0**number))
        assert (len(state.profile.initial), len(state.profile.drift_residuals)) == (initial, residuals)
        assert plan.assessment == ""


def test_the_second_moderate_in_a_row_reduces_not_the_first_nor_the_third() -> None:
    state, plan = step(monitored(), drift=1.2)
    assert (plan.action, plan.horizon) == ("keep", 30)
    _, plan = step(state, drift=1.2)
    assert (plan.action, plan.horizon) == ("reduce", 25)


def test_a_deviating_interval_leaves_the_profile_alone_and_a_consistent_one_does_not() -> None:
    before = monitored()
    moderate, _ = step(before, drift=1.2)
    assert moderate.profile == before.profile
    consistent, plan = step(before, drift=1.1)
    assert plan.assessment == "consistent" and len(consistent.profile.drift_residuals) == 4
    supporting, _ = step(before)
    assert len(supporting.profile.drift_residuals) == 4


def test_a_candidate_leaves_the_accepted_profile_alone() -> None:
    before, _ = step(monitored())
    assert before.phase == "candidate"
    again, _ = step(before, drift=1.1)
    assert again.phase == "confirm" and again.profile == before.profile


@pytest.mark.parametrize("drift,action", [(1.0, "adopt"), (1.1, "adopt"), (1.2, "reject"), (1.5, "reject")])
def test_the_second_candidate_interval_decides(drift: float, action: str) -> None:
    state, _ = step(step(monitored())[0], drift=1.1)
    state, plan = step(state, drift=drift)
    assert plan.action == action
    assert state.accepted == (34 if action == "adopt" else 30)
    assert (state.bound is None) == (action == "adopt")


def test_two_severe_do_not_fall_back_and_a_good_one_between_resets_the_count() -> None:
    wide = AutoLoCoPolicy(config=AutoLoCoConfig(base_horizon=30, horizon_step=1, min_horizon=1, scale_floor=0.05))
    state, _ = step(monitored(wide), wide, drift=1.5)
    state, plan = step(state, wide, drift=float("nan"))
    assert (plan.action, plan.horizon) == ("reduce", 13)
    fallen, plan = step(state, wide, drift=float("nan"))
    assert (plan.action, plan.horizon) == ("fallback", 1)
    for _ in range(4):
        state, _ = step(state, wide)
    assert (state.phase, state.severes) == ("monitor", 2)
    state, plan = step(state, wide, drift=1.1)
    assert state.severes == 0
    state, plan = step(state, wide, drift=1.9)
    assert (plan.action, plan.horizon) == ("reduce", 9)  # 13 / 1.5 = 8.7


def test_a_fleet_of_one_stays_at_the_base_horizon() -> None:
    state, plan = BASE.start(preview(BASE.grid))
    for number in range(20):
        seen = of_plan(plan, BASE.grid, position=30 * number, roster=1, fleet=1, density=100)
        state, plan = BASE.advance(state, seen)
        assert (plan.horizon, plan.assessment) == (30, "")
    assert state.tokens.calibrated  # tokens are counted all the same


def test_warm_up_is_over_with_the_interval_that_completes_it() -> None:
    policy = AutoLoCoPolicy(config=AutoLoCoConfig(base_horizon=30, warmup_steps=31, scale_floor=0.05))
    state, plan = policy.start(preview(policy.grid))
    assert plan.phase == "warm-up"
    for position, initial in ((0, 0), (30, 1)):
        state, plan = policy.advance(state, of_plan(plan, policy.grid, position=position))
        assert len(state.profile.initial) == initial


def test_a_state_of_another_version_or_shape_is_refused() -> None:
    good = monitored().to_dict()
    assert AutoLoCoState.from_dict(good) == monitored()
    for bad in ({**good, "version": 2}, {**good, "phase": "sleep"}, {}):
        with pytest.raises(ValueError, match="controller state"):
            AutoLoCoState.from_dict(bad)
    for key in good:
        with pytest.raises(ValueError, match="controller state"):
            AutoLoCoState.from_dict({name: value for name, value in good.items() if name != key})
    with pytest.raises(ValueError, match="controller state can't be read"):
        AutoLoCoState.from_dict({**good, "profile": []})


def test_a_state_cannot_be_changed() -> None:
    state = monitored()
    with pytest.raises(AttributeError):
        state.accepted = 5  # type: ignore[misc]
    assert replace(state, accepted=29) != state
