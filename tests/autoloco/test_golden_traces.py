"""Observations in, decisions out: traces worked out by hand from docs/method.md, kept as JSON.

Each file says in `why` what decides a round. The learning rate is constant from one observation to the next,
so that every preview is `next_lr` times the steps. `--write-golden` rewrites the decisions: check each again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from composer_replication.autoloco import (
    AutoLoCoConfig,
    AutoLoCoPolicy,
    AutoLoCoState,
    Observation,
    Plan,
    Preview,
)

GOLDEN = Path(__file__).parent.parent / "golden"
TRACES = sorted(path.stem for path in GOLDEN.glob("*.json"))


def preview_of(policy: AutoLoCoPolicy, next_lr: float, remaining: int | None) -> Preview:
    inside = [steps if remaining is None else min(steps, remaining) for steps in policy.grid]
    return Preview(
        steps=policy.grid, sums=tuple(next_lr * steps for steps in inside), next_lr=next_lr, remaining=remaining
    )


def decision(state: AutoLoCoState, plan: Plan) -> dict[str, Any]:
    return {
        "horizon": plan.horizon,
        "steps": plan.steps,
        "reference_steps": plan.reference_steps,
        "mass": plan.mass,
        "base_mass": plan.base_mass,
        "truncated": plan.truncated,
        "phase": plan.phase,
        "assessment": plan.assessment,
        "action": plan.action,
        "bound": None if state.bound is None else [state.bound.horizon, state.bound.mass],
    }


def dumped(trace: dict[str, Any]) -> str:
    """One line for each observation and each decision."""
    lines = ["{"]
    lines += [f"  {json.dumps(key)}: {json.dumps(trace[key])}," for key in ("title", "config", "fleet", "start")]
    rounds = [
        "    {" + ",\n     ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in row.items()) + "}"
        for row in trace["rounds"]
    ]
    return "\n".join([*lines, '  "rounds": [', ",\n".join(rounds), "  ]", "}", ""])


def test_the_traces_are_there() -> None:
    assert len(TRACES) == 9


@pytest.mark.parametrize("name", TRACES)
def test_replay(name: str, write_golden: bool) -> None:
    path = GOLDEN / f"{name}.json"
    trace = json.loads(path.read_text())
    policy = AutoLoCoPolicy(config=AutoLoCoConfig(**trace["config"]))
    start = trace["start"]
    state, plan = policy.start(preview_of(policy, start["next_lr"], start["remaining"]))
    assert write_golden or decision(state, plan) == start["then"]
    start["then"] = decision(state, plan)

    for number, row in enumerate(trace["rounds"], 1):
        seen = dict(row["seen"])
        assert seen["steps"] == plan.steps * seen["roster"], (
            f"round {number}: the observation isn't of what was planned"
        )
        preview = preview_of(policy, seen.pop("next_lr"), seen.pop("remaining"))
        for field in ("drift", "mean_square_norm", "mass"):
            seen[field] = float(seen[field])  # JSON has no NaN: it is written as a string
        # The state goes through JSON each time, as it does in a checkpoint.
        state = policy.state_from_dict(json.loads(json.dumps(state.to_dict(), allow_nan=False)))
        state, plan = policy.advance(state, Observation(fleet=trace["fleet"], preview=preview, **seen))
        got = decision(state, plan)
        assert write_golden or got == row["then"], f"round {number}: {row.get('why', '')}"
        row["then"] = got
    if write_golden:
        path.write_text(dumped(trace))
    else:
        assert path.read_text() == dumped(trace), "the file isn't laid out as --write-golden lays it out"
