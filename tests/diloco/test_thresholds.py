"""When a loss level was reached, from rounds whose numbers are easy to add up."""

from __future__ import annotations

import math

import pytest

from composer_replication.diloco.round_record import Observed, RoundRecord
from composer_replication.diloco.thresholds import Crossing, round_seconds, thresholds


def record(index: int, steps: int, position: int, *told: dict[str, float], tokens: int | None = 100) -> RoundRecord:
    return RoundRecord(
        observed=Observed(
            round=index,
            position=position,
            members=tuple(range(len(told))),
            observation=None,
            steps=steps,
            tokens=tokens,
            replicas=dict(enumerate(told)),
        ),
        horizon=steps,
        rho=1.0,
        momentum=0.7,
        outer_lr=0.7,
        phase="monitor",
        assessment="",
        action="keep",
        next_horizon=steps,
        next_steps=steps,
    )


def times(loss: float, train: float, wait: float) -> dict[str, float]:
    return {"loss": loss, "train_seconds": train, "wait_seconds": wait, "exchange_seconds": wait + 1.0}


RUN = [
    record(0, 10, 10, times(5.0, 7.0, 2.0), times(3.0, 9.0, 0.0)),  # mean 4, ten seconds
    record(1, 30, 40, times(3.0, 20.0, 4.0), times(2.0, 23.0, 1.0)),  # mean 2.5, 25 s
    record(2, 10, 50, times(3.0, 8.0, 1.0), times(3.0, 9.0, 0.0)),  # up again: 3.0
    record(3, 10, 60, times(1.0, 8.0, 1.0), times(1.0, 9.0, 0.0)),
]


def test_the_first_round_at_or_below_a_level() -> None:
    assert thresholds(RUN, [2.5, 4.5, 0.5]) == [
        Crossing(level=2.5, round=1, steps=40, tokens=200, seconds=35.0),
        Crossing(level=4.5, round=0, steps=10, tokens=100, seconds=10.0),
        Crossing(level=0.5),
    ]


def test_smoothed_over_rounds_by_their_steps() -> None:
    # Rounds 0 and 1: (10 * 4 + 30 * 2.5) / 40 = 2.875; 1 and 2: (75 + 30) / 40 = 2.625; 2 and 3: 2.
    steps = [crossing.steps for crossing in thresholds(RUN, [2.9, 2.875, 2.7, 2.0, 1.9], smooth=2)]
    assert steps == [40, 40, 50, 60, None]
    assert [one.steps for one in thresholds(RUN, [9.0], smooth=4)] == [60]
    assert thresholds(RUN, [9.0], smooth=5) == [Crossing(level=9.0)]


def test_what_isn_t_known_stays_unknown() -> None:
    rounds = [RUN[0], record(1, 30, 40, {"loss": 2.0}, tokens=None), RUN[3]]
    (low, high) = thresholds(rounds, [2.0, 4.0])
    assert (low.steps, low.tokens, low.seconds) == (40, None, None)
    assert (high.steps, high.tokens, high.seconds) == (10, 100, 10.0)
    silent = [record(0, 10, 10, {}, {}), record(1, 10, 20, {"loss": math.nan}), record(2, 10, 30, {"loss": 2.0})]
    assert thresholds(silent, [3.0])[0].steps == 30
    assert round_seconds(silent[0]) is None and thresholds([], [3.0]) == [Crossing(level=3.0)]


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="smooth must be at least 1"):
        thresholds(RUN, [1.0], smooth=0)
    with pytest.raises(ValueError, match="levels must be finite"):
        thresholds(RUN, [math.nan])
