"""A round's record: nothing is lost in JSON, and the policy that trained decides the same when it is asked again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from composer_replication.diloco.round_record import RECORD_VERSION, RoundRecord, record_of, replay
from composer_replication.recipe import load_recipe, outer_config, policy_of
from composer_replication.simulation import simulate

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
SMALL = [
    "fleet.replicas=2",
    "training.steps=120",
    "scheduler.warmup_steps=2",
    "autoloco.warmup_steps=2",
    "autoloco.base_horizon=8",
    "autoloco.horizon_step=1",
    "model.args.width=16",
    "data.args.batch_size=4",
    "data.args.max_bytes=60000",
    "data.args.validation_bytes=2000",
]


@pytest.fixture(scope="module", params=["autoloco", "qsr"])
def run(request: pytest.FixtureRequest) -> tuple[Any, list[RoundRecord]]:
    recipe = load_recipe(RECIPE, [*SMALL, f"autoloco.policy={request.param}"])
    return recipe, [record_of(one) for one in simulate(recipe).rounds]


def test_json_loses_nothing(run: tuple[Any, list[RoundRecord]]) -> None:
    for record in run[1]:
        line = record.to_line()
        assert line.count("\n") == 1
        again = RoundRecord.from_json(json.loads(line))
        assert again.to_line() == line and again.observed.observation == record.observed.observation


def test_the_policy_decides_the_same_again(run: tuple[Any, list[RoundRecord]]) -> None:
    recipe, records = run
    kept = [RoundRecord.from_json(json.loads(record.to_line())) for record in records]
    again = replay(policy_of(recipe), outer_config(recipe), [record.observed for record in kept])
    assert [one.to_json() for one in again] == [one.to_json() for one in kept]
    assert sum(one.steps for one in again) == 120
    if recipe.autoloco.policy == "autoloco":
        assert {one.action for one in again} >= {"grow"} and {one.assessment for one in again} > {""}


def test_another_observation_is_another_decision(run: tuple[Any, list[RoundRecord]]) -> None:
    recipe, records = run
    if recipe.autoloco.policy != "autoloco":
        pytest.skip("qsr looks at the learning rate alone")
    lines = [json.loads(record.to_line()) for record in records]
    first = next(line for line in lines if line["assessment"])
    first["observation"]["drift"] *= 1e6
    changed = [RoundRecord.from_json(line).observed for line in lines]
    again = replay(policy_of(recipe), outer_config(recipe), changed)
    assert again[first["round"]].assessment == "severe" != first["assessment"]


def test_what_is_not_finite_is_null(run: tuple[Any, list[RoundRecord]]) -> None:
    last = run[1][-1]
    assert last.observed.observation is None  # nobody goes on
    assert last.to_json()["drift"] is None and math.isnan(RoundRecord.from_json(last.to_json()).drift)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": RECORD_VERSION + 1}, f"version {RECORD_VERSION + 1}, this package reads {RECORD_VERSION}"),
        ({"members": None}, "of the wrong kind"),
        ({"rho": ...}, "lacks 'rho'"),
        ({"observation": {"drift": 1.0}}, "lacks 'preview'"),
    ],
)
def test_a_record_that_cannot_be_read_says_why(
    run: tuple[Any, list[RoundRecord]], change: dict[str, Any], words: str
) -> None:
    data = {**run[1][0].to_json(), **change}
    data = {name: value for name, value in data.items() if value is not ...}
    with pytest.raises(ValueError, match=words):
        RoundRecord.from_json(data)
    with pytest.raises(ValueError, match="JSON object"):
        RoundRecord.from_json([data])
