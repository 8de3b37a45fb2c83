"""The policies by name, the baselines, and the golden schedules."""

from __future__ import annotations

import json
from statistics import median

import pytest

from composer_replication.autoloco import (
    POLICIES,
    AutoLoCoConfig,
    FixedPolicy,
    LinearPolicy,
    Policy,
    QSRPolicy,
    cosine_rates,
    fixed_intervals,
    linear_rates,
    make_policy,
    mass_ratio,
    run_lengths,
    run_schedule,
    schedule_rates,
)
from tests.autoloco.observations import observation, preview

C4 = AutoLoCoConfig(base_horizon=500, warmup_steps=1000)
ULTRACHAT = AutoLoCoConfig(base_horizon=100, warmup_steps=200)
C4_RUNS = ((500, 7), (550, 5), (600, 5), (650, 5), (700, 5), (750, 45), (250, 1))
TO_ZERO = ((100, 7), (110, 5), (120, 5), (130, 5), (150, 26), (90, 1))
NOT_TO_ZERO = ((100, 7), (110, 5), (120, 5), (130, 5), (140, 5), (150, 21), (140, 1))


def every_policy(config: AutoLoCoConfig = C4) -> list[Policy]:
    return [make_policy(name, config, **({"peak_lr": 1.0} if name == "qsr" else {})) for name in POLICIES]


@pytest.mark.parametrize("name", ["autoloco", "staircase"])
@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_the_published_pretraining_schedule_of_73_rounds(name: str, decay: str) -> None:
    done = run_schedule(make_policy(name, C4), schedule_rates(decay, 50_000, 1000), 50_000)
    assert run_lengths(done.steps) == C4_RUNS
    assert (done.rounds, sum(done.steps)) == (73, 50_000)
    assert done.horizons[-1] == 750 and [plan.truncated for plan in done.plans] == [False] * 72 + [True]


@pytest.mark.parametrize("name", ["autoloco", "staircase"])
@pytest.mark.parametrize(
    "decay,final,runs", [("cosine", 0.0, TO_ZERO), ("cosine", 0.1, NOT_TO_ZERO), ("linear", 0.0, NOT_TO_ZERO)]
)
def test_the_published_fine_tuning_count_of_49_rounds(
    name: str, decay: str, final: float, runs: tuple[tuple[int, int], ...]
) -> None:
    done = run_schedule(make_policy(name, ULTRACHAT), schedule_rates(decay, 6490, 200, final), 6490)
    assert run_lengths(done.steps) == runs
    assert (done.rounds, sum(done.steps)) == (49, 6490)


@pytest.mark.parametrize("peak", [1.0, 3e-4])
def test_the_published_quadratic_rule_of_41_rounds(peak: float) -> None:
    policy = make_policy("qsr", C4, peak_lr=peak)
    done = run_schedule(policy, cosine_rates(50_000, 1000, peak=peak), 50_000)
    assert (done.rounds, median(done.steps), sum(done.steps)) == (41, 603, 50_000)


def test_the_published_linear_rule_of_100_rounds() -> None:
    done = run_schedule(make_policy("linear", C4), lambda step: 1.0, 50_000)
    assert done.steps == (*range(10, 1000, 10), 500)
    assert done.horizons[-1] == 1000


def test_the_fixed_interval() -> None:
    done = run_schedule(make_policy("fixed", ULTRACHAT), cosine_rates(6490, 200), 6490)
    assert run_lengths(done.steps) == ((100, 64), (90, 1))
    assert fixed_intervals(6490, 100) == len(done.steps)


def test_only_the_adaptive_ones_correct_the_outer_step() -> None:
    for policy in every_policy():
        plans = run_schedule(policy, cosine_rates(50_000, 1000), 50_000).plans
        ratios = {mass_ratio(plan.mass, plan.base_mass) for plan in plans}
        assert (ratios == {1.0}) == (policy.name in ("fixed", "qsr", "linear"))


def test_growth_is_off_while_nothing_can_be_measured_but_for_the_staircase() -> None:
    for policy, grows in ((make_policy("autoloco", ULTRACHAT), False), (make_policy("staircase", ULTRACHAT), True)):
        state, plan = policy.start(preview(policy.grid))
        for number in range(1, 12):
            seen = observation(
                roster=1, fleet=1, drift=float("nan"), position=100 * number, preview=preview(policy.grid), tokens=7
            )
            state, plan = policy.advance(state, seen)
        assert (plan.horizon > 100) == grows
        assert plan.steps == plan.horizon or not grows  # the staircase counts steps, not tokens


def test_every_policy_restores_its_state_and_names_its_settings() -> None:
    for policy in every_policy(ULTRACHAT):
        described = json.loads(json.dumps(policy.settings(), allow_nan=False))
        assert described["policy"] == policy.name and len(described) > 1
        state, plan = policy.start(preview(policy.grid, remaining=5000))
        for number in range(1, 9):
            seen = observation(position=100 * number, preview=preview(policy.grid, remaining=5000 - 100 * number))
            restored = policy.state_from_dict(json.loads(json.dumps(state.to_dict())))
            assert policy.advance(restored, seen) == policy.advance(state, seen)
            state, plan = policy.advance(state, seen)
        with pytest.raises(ValueError, match="version"):
            policy.state_from_dict({**state.to_dict(), "version": 99})


def test_the_quadratic_rule_by_hand() -> None:
    policy = QSRPolicy(base_horizon=10, warmup_steps=20, alpha=0.5)
    for position, lr, remaining, steps in (
        (0, 0.1, 90, 10),  # warm-up: (0.5 / 0.1)^2 = 25 is not asked
        (20, 0.1, 90, 25),
        (20, 0.12, 90, 17),  # 17.4, rounded down
        (20, 0.4, 90, 10),  # 1.6: not below the base
        (20, 0.01, 90, 90),  # 2,500: what is left
        (20, 0.0, 90, 90),  # no finite answer: what is left ...
        (20, 0.0, None, 10),  # ... or the base
        (20, 0.1, 0, 0),
    ):
        state, _ = policy.start(preview(policy.grid))
        _, plan = policy.advance(
            state, observation(position=position, preview=preview(policy.grid, lr=lr, remaining=remaining))
        )
        assert plan.steps == steps, (position, lr, remaining)
    assert QSRPolicy(base_horizon=100, peak_lr=0.2).coefficient == pytest.approx(2.0)


def test_a_truncated_interval_is_not_one_of_the_linear_rules() -> None:
    policy = LinearPolicy(increment=5)
    state, plan = policy.start(preview(policy.grid))
    assert plan.steps == 5
    state, plan = policy.advance(state, observation(truncated=True, preview=preview(policy.grid)))
    assert plan.steps == 5
    state, plan = policy.advance(state, observation(preview=preview(policy.grid)))
    assert plan.steps == 10


@pytest.mark.parametrize(
    "name,suggested",
    [("autolocco", "autoloco"), ("qrs", "qsr"), ("Fixed", "fixed"), ("diloco", "fixed"), ("my-DiLoCo", "fixed")],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, suggested: str) -> None:
    with pytest.raises(ValueError, match=rf"there is no policy '{name}' .*did you mean '{suggested}'"):
        make_policy(name, C4)


def test_bad_options_are_refused() -> None:
    for name, options, message in (
        ("fixed", {"alpha": 1.0}, "policy 'fixed' has no option 'alpha'"),
        ("qsr", {}, "needs alpha, or peak_lr"),
        ("qsr", {"alpha": -1.0}, "alpha must be a positive number, not -1.0"),
        ("linear", {"increment": 0}, "increment must be a whole number of at least 1, not 0"),
    ):
        with pytest.raises(ValueError, match=message):
            make_policy(name, C4, **options)
    with pytest.raises(ValueError, match="horizon must be"):
        FixedPolicy(horizon=0)


def test_the_first_rates_by_hand() -> None:
    assert linear_rates(8, 2, final_fraction=0.5) == pytest.approx(
        (0.5, 1.0, 1.0, 1 - 0.5 / 6, 1 - 1 / 6, 1 - 1.5 / 6, 1 - 2 / 6, 1 - 2.5 / 6)
    )
    assert cosine_rates(5, 1, peak=2.0) == pytest.approx((2.0, 2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5))
    assert linear_rates(2, 2) == (0.5, 1.0)  # nothing but warm-up


@pytest.mark.parametrize(
    "make",
    [
        lambda: schedule_rates("sawtooth", 10),
        lambda: cosine_rates(0),
        lambda: cosine_rates(10, 11),
        lambda: cosine_rates(10, final_fraction=1.1),
        lambda: cosine_rates(10, peak=0.0),
        lambda: run_schedule(make_policy("fixed", C4), [1.0] * 9, 10),
        lambda: run_schedule(make_policy("fixed", C4), [], 0),
    ],
)
def test_bad_schedules_are_refused(make) -> None:
    with pytest.raises(ValueError, match="must"):
        make()
