"""Settings of runs as names and values, and which of them differ.

Invariant: what a run doesn't say has no name here; it is never taken to be the same as in another run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from composer_replication.report.runs import Run

__all__ = ["differing_settings", "flat", "shown_settings", "task_apart"]

TASK = "task."
_OTHER_LOSSES = ("task.model.", "task.data.", "task.disturbance")  # with these unlike, so are the losses


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted names, values as text."""
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        elif value is not None:
            found[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return found


def shown_settings(run: Run) -> dict[str, str]:
    """Each once: policies repeat their name, and the base horizon, among their own settings."""
    found = flat(run.settings)
    base = found.get("base_horizon")
    repeated = {"policy.settings.policy": found.get("policy.name")}
    repeated |= {f"policy.settings.{name}": base for name in ("base_horizon", "horizon")}
    return {name: value for name, value in found.items() if repeated.get(name) != value}


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """Names of settings that aren't the same in all runs, the plain ones first."""
    each = [shown_settings(run) for run in runs]
    names = dict.fromkeys(name for one in each for name in one)
    return [name for name in names if len({one.get(name) for one in each}) > 1]


def task_apart(runs: Sequence[Run], *, losses_only: bool = False) -> list[str]:
    """Names of what differs in what they were trained on, of those runs that say it: with `losses_only` those that
    make losses another measure, not only other numbers."""
    names = differing_settings([run for run in runs if run.task is not None])
    return [name for name in names if name.startswith(_OTHER_LOSSES if losses_only else TASK)]
