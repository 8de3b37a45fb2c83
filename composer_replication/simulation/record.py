"""A simulated run as plain JSON: its settings, every round with what the policy observed, and how it ended.

Invariant: nothing but numbers and names; from the rounds' observations anyone can replay the decisions
(`diloco/round_record.py`). docs/report.md names every field.
"""

from __future__ import annotations

import math
import platform
from dataclasses import asdict
from typing import Any

import torch

from composer_replication import __version__
from composer_replication.diloco.round_record import RECORD_VERSION, record_of
from composer_replication.recipe import Recipe, outer_config, policy_of, task_of
from composer_replication.simulation.data_parallel import DataParallelRun
from composer_replication.simulation.fleet import SimulatedRun

__all__ = ["record_of_simulation"]


def record_of_simulation(
    recipe: Recipe, run: SimulatedRun | DataParallelRun, *, name: str, seconds: float
) -> dict[str, Any]:
    """The run's record. `seconds` is what the simulation took."""
    head = {
        "version": RECORD_VERSION,
        "kind": "run",
        "name": name,
        "source": "simulation",
        "replicas": run.replicas,
        "seed": run.seed,
        "steps": run.steps,
        "elements": run.elements,
        "base_horizon": recipe.autoloco.base_horizon,
        "task": {**task_of(recipe), "disturbance": None if isinstance(run, DataParallelRun) else run.disturbance},
        "versions": {
            "composer-replication": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
        },
    }
    result: dict[str, Any] = {"validation_loss": _finite(run.validation_loss), "seconds": round(seconds, 1)}
    if isinstance(run, DataParallelRun):
        return {
            **head,
            "codec": "float32",
            "policy": {"name": "ddp"},
            "outer": None,
            "rounds": [],
            "losses": [[position, _finite(loss)] for position, loss in run.losses],
            "result": {**result, "synchronisations": run.steps},
        }
    policy = policy_of(recipe)
    return {
        **head,
        "codec": recipe.codec,
        "policy": {"name": policy.name, "settings": policy.settings()},
        "outer": asdict(outer_config(recipe).resolved(policy.name)),
        "rounds": [_round(record_of(one).to_json(), one.bytes_sent) for one in run.rounds],
        "result": {
            **result,
            "synchronisations": len(run.rounds),
            "bytes_sent": run.bytes_sent,
            "digest": run.digest,
        },
    }


def _round(record: dict[str, Any], sent: int) -> dict[str, Any]:
    """With what replica 0 sent: all send alike."""
    return {**record, "bytes_sent": sent}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
