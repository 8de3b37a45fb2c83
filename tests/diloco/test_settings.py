"""A run that is resumed goes on by the settings that it began with, over any fleet."""

from __future__ import annotations

from typing import Any

import pytest

from composer_replication.autoloco.config import AutoLoCoConfig, OuterConfig
from composer_replication.autoloco.policies import AutoLoCoPolicy, FixedPolicy
from composer_replication.collective.in_process import InProcessFleet
from composer_replication.errors import FleetMismatch
from tests.diloco.test_loop import make_replica, through_bytes

ADAPTIVE = AutoLoCoPolicy(config=AutoLoCoConfig(base_horizon=4))


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"policy": AutoLoCoPolicy(config=AutoLoCoConfig(base_horizon=6))}, "base_horizon: 6 here, 4 there"),
        ({"policy": FixedPolicy(horizon=4)}, "policy"),
        ({"outer": OuterConfig(lr=0.5)}, "outer.lr: 0.5 here, 0.7 there"),
        ({"weighting": "tokens"}, "weighting: 'tokens' here, 'equal' there"),
        ({"settings": {"mine": 2}}, "mine: only here"),
    ],
)
def test_other_settings_are_named(changed: dict[str, Any], line: str) -> None:
    usual: dict[str, Any] = {"policy": ADAPTIVE, "outer": OuterConfig()}
    one = make_replica(InProcessFleet(1).collectives()[0], **usual).run(9)
    state = through_bytes(one.loop.state_dict())
    other = make_replica(InProcessFleet(1).collectives()[0], **{**usual, **changed})
    other.loop.load_state_dict(state)
    with pytest.raises(FleetMismatch, match="can't resume with other settings") as caught:
        other.run()
    assert line in str(caught.value)
    same = make_replica(InProcessFleet(1).collectives()[0], **usual)
    same.loop.load_state_dict(state)
    same.run()
    assert same.loop.round > one.loop.round
