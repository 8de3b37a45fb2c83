"""One replica in this process, from its spec: what a function of a service calls that ships Python functions.

Invariant: the replica is the one that `replica_entrypoint` would run. It tells how it ended by returning or raising.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from composer_replication.diloco.serverless import replica_entrypoint
from composer_replication.diloco.serverless.handle import ReplicaResult
from composer_replication.diloco.serverless.spec import ReplicaSpec, entrypoint_arguments, environment_with
from composer_replication.isolate import REPLICA, REPLICAS

__all__ = ["run_replica"]


def run_replica(spec: ReplicaSpec | None = None, *, output: str | Path | None = None, **settings: Any) -> ReplicaResult:
    """Train one replica to its end in this process; returns what its executor would collect.

    Its settings are a spec's, in a `ReplicaSpec` or as keywords (`replica_id=0, num_replicas=4, rendezvous_uri=...`;
    `model` is short for `model_id`, and `num_replicas` may come from the environment). `output` is its folder for
    checkpoints and result; started again with the same one, it goes on from there. `extra_env` holds while it runs.

    Raises RecipeError and ValueError for settings that don't fit, what the fleet's rounds raise, and SystemExit when it
    was asked to stop.
    """
    if spec is None:
        if "model" in settings:
            settings["model_id"] = settings.pop("model")
        if os.environ.get(REPLICAS):
            settings.setdefault("num_replicas", int(os.environ[REPLICAS]))
        missing = [name for name in ("replica_id", "num_replicas", "rendezvous_uri") if name not in settings]
        if missing:
            raise ValueError(f"run_replica needs a ReplicaSpec, or {', '.join(missing)}")
        spec = ReplicaSpec(**settings)
    elif settings:
        spec = replace(spec, **settings)
    if spec.command:
        raise ValueError("this spec has a command of its own, which only a process of its own can run: use an executor")
    arguments = entrypoint_arguments(spec)
    if output is not None:
        arguments.append(f"--output={output}")
    names = {REPLICA: str(spec.replica_id), REPLICAS: str(spec.num_replicas)}
    with environment_with({**(spec.extra_env or {}), **names}):
        identity, uri, recipe, folder = replica_entrypoint.settings(arguments)
        result = replica_entrypoint.train(recipe, identity, uri, folder)
    checkpoint = result.pop("final_checkpoint_uri", None)
    return ReplicaResult(spec.replica_id, str(result.get("status", "completed")), checkpoint, result)
