"""What one replica is to run: the launch settings that every executor takes.

Invariant: a spec is plain values; whoever starts the replica adds nothing that changes what it computes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from composer_replication.isolate import REPLICA, REPLICAS, STORE

__all__ = [
    "ReplicaSpec",
    "check_fleet",
    "entrypoint_arguments",
    "entrypoint_command",
    "environment_with",
    "merged_environment",
    "replica_command",
]

ENTRYPOINT = "composer_replication.diloco.serverless.replica_entrypoint"


@dataclass(frozen=True)
class ReplicaSpec:
    """One replica's launch settings: by hand, or with `recipe`, which then says all that isn't identity.

    By hand it is the fixed interval (DiLoCo): `outer_rounds` rounds of `sync_every` inner steps. `model_id` is a causal
    language model, by its name on the Hugging Face Hub (`owner/name`) or its folder, which is trained on the text at
    `extra_env["DATA_URI"]`; the name of a built-in model; or the import path of a LightningModule
    (`my_package.my_module.MyModel`) that can be constructed without arguments (a ComposerModel with
    `trainer="composer"`). `inner_optimizer` is e.g. `{"name": "AdamW", "lr": 4e-4}`.
    """

    replica_id: int
    num_replicas: int
    rendezvous_uri: str  # file://, memory:// or whatever else a store was registered for
    model_id: str = "byte_gpt"
    inner_optimizer: dict[str, Any] = field(default_factory=dict)
    sync_every: int = 500
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    outer_rounds: int = 100
    extra_env: dict[str, str] | None = field(default=None, repr=False)  # may hold credentials: never shown
    recipe: str | None = None  # path of a recipe file on this machine
    overrides: tuple[str, ...] = ()  # key=value, put over the recipe
    trainer: str = "lightning"  # or composer, whose own launcher then starts the replica
    command: tuple[str, ...] = ()  # run this instead of the entry point: a script of one's own, ("python", "train.py")

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ValueError(f"num_replicas must be at least 1, got {self.num_replicas}")
        if not 0 <= self.replica_id < self.num_replicas:
            raise ValueError(
                f"replica_id must be between 0 and num_replicas - 1 = {self.num_replicas - 1}, got {self.replica_id}"
            )
        if not self.rendezvous_uri:
            raise ValueError("rendezvous_uri is empty: give the store's URI, like file:///shared/run1")
        if self.trainer not in ("lightning", "composer"):
            raise ValueError(f"trainer must be 'lightning' or 'composer', got {self.trainer!r}")
        for name in ("sync_every", "outer_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def check_fleet(specs: Sequence[ReplicaSpec]) -> None:
    """Refuse specs that can't be one fleet: ids given twice, or differing counts or stores. ValueError."""
    seen: set[int] = set()
    for spec in specs:
        if spec.replica_id in seen:
            raise ValueError(f"replica_id {spec.replica_id} is given twice")
        seen.add(spec.replica_id)
        for name in ("num_replicas", "rendezvous_uri"):
            mine, first = getattr(spec, name), getattr(specs[0], name)
            if mine != first:
                raise ValueError(
                    f"{name} must be the same for the whole fleet: replica {specs[0].replica_id} has {first!r}, "
                    f"replica {spec.replica_id} has {mine!r}"
                )


def entrypoint_arguments(spec: ReplicaSpec, recipe: str | None = None) -> list[str]:
    """The arguments of `replica_entrypoint` that say what the spec says (`extra_env` apart).

    `recipe` is where the replica finds the recipe, if that isn't the spec's path.
    """
    arguments = [f"--replica-id={spec.replica_id}", f"--num-replicas={spec.num_replicas}"]
    arguments.append(f"--rendezvous-uri={spec.rendezvous_uri}")
    if spec.recipe is not None:
        arguments.append(f"--recipe={recipe or spec.recipe}")
    else:
        arguments += [
            f"--trainer={spec.trainer}",
            f"--model-id={spec.model_id}",
            f"--inner-optimizer={json.dumps(spec.inner_optimizer)}",
            f"--sync-every={spec.sync_every}",
            f"--outer-rounds={spec.outer_rounds}",
            f"--outer-lr={spec.outer_lr!r}",
            f"--outer-momentum={spec.outer_momentum!r}",
        ]
    return [*arguments, *spec.overrides]


def replica_command(spec: ReplicaSpec, recipe: str | None = None, python: str = "python") -> list[str]:
    """The command that runs one replica on a machine where this package is installed.

    Under Composer each replica has a launcher of its own: that of several processes ends them all when one fails.
    """
    if spec.command:
        return list(spec.command)
    launcher = ["composer.cli", "-n", "1", "-m"] if spec.trainer == "composer" else []
    return [python, "-m", *launcher, ENTRYPOINT, *entrypoint_arguments(spec, recipe)]


def entrypoint_command(spec: ReplicaSpec, python: str | None = None) -> list[str]:
    """As `replica_command`, on this machine with this interpreter."""
    return replica_command(spec, python=python or sys.executable)


def merged_environment(spec: ReplicaSpec, base: dict[str, str] | None = None) -> dict[str, str]:
    """This process's environment, the executor's, then the spec's. Output isn't held back.

    A command of one's own learns from it who it is; the entry point is told by its arguments.
    """
    who = {REPLICA: str(spec.replica_id), REPLICAS: str(spec.num_replicas), STORE: spec.rendezvous_uri}
    own = who if spec.command else {}
    return {**os.environ, "PYTHONUNBUFFERED": "1", **own, **(base or {}), **(spec.extra_env or {})}


@contextmanager
def environment_with(more: Mapping[str, str]) -> Iterator[None]:
    """This process's environment, with `more` in it while the block lasts."""
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
