"""The options that every adapter takes, by the same names: read once, checked at construction.

Invariant: what can't work is a ValueError that names the option, before anything is opened or trained.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import torch

from composer_replication.adapter.meeting import Meet, given_collective, open_store
from composer_replication.adapter.settings import check_choice, check_whole, make_settings
from composer_replication.adapter.tokens import TokenFunction
from composer_replication.autoloco.config import OuterConfig
from composer_replication.autoloco.values import Policy
from composer_replication.collective.base import Collective
from composer_replication.collective.codec import check_codec
from composer_replication.isolate import REPLICA, REPLICAS, Identity, read_identity

__all__ = ["Options", "read_options"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """An adapter's arguments, checked."""

    identity: Identity
    meet: Meet
    policy: Policy
    outer: OuterConfig
    outer_device: str | torch.device = "cpu"
    weighting: Literal["equal", "tokens"] = "equal"
    buffers: Literal["average", "local"] = "average"
    optimizer: int | None = None
    pad_token_id: int | None = None
    token_fn: TokenFunction | None = None
    validate_with: Literal["local", "shared"] = "local"
    checkpoint_dir: Path | None = None
    checkpoint_every_rounds: int = 1


def read_options(
    store: Any = None,
    *,
    interrupted: Callable[[], bool],
    replica: int | None = None,
    replicas: int | None = None,
    launcher: str | None = None,
    collective: Collective | Callable[[int], Collective] | None = None,
    control: Any = None,
    run: str = "",
    policy: str | Policy = "autoloco",
    base_horizon: int | None = None,
    min_horizon: int | None = None,
    max_horizon: int | None = None,
    horizon_step: int | None = None,
    warmup_steps: int | None = None,
    outer_lr: float = 0.7,
    outer_momentum: float | None = None,
    normalize: bool = False,
    codec: str = "float32",
    replica_failure_policy: Literal["strict", "skip"] = "strict",
    min_replicas: int | None = None,
    timeout: float = 600.0,
    start_timeout: float = 900.0,
    deadline: Literal["adaptive", "fixed"] = "adaptive",
    outer_device: str | torch.device = "cpu",
    weighting: Literal["equal", "tokens"] = "equal",
    buffers: Literal["average", "local"] = "average",
    optimizer: int | None = None,
    pad_token_id: int | None = None,
    token_fn: TokenFunction | None = None,
    validate_with: Literal["local", "shared"] = "local",
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every_rounds: int = 1,
    checkpoint_every: int | None = None,
    **more: Any,
) -> Options:
    """Check an adapter's arguments (docs/lightning.md lists them).

    `interrupted` says whether the process was asked to stop. Raises ValueError.
    """
    named = {"base_horizon": base_horizon, "min_horizon": min_horizon, "max_horizon": max_horizon}
    named |= {"horizon_step": horizon_step, "warmup_steps": warmup_steps}
    outer = {"outer_lr": outer_lr, "outer_momentum": outer_momentum, "normalize": normalize}
    made, outer_config = make_settings(policy, {**{k: v for k, v in named.items() if v is not None}, **outer, **more})
    check_choice("replica_failure_policy", replica_failure_policy, ("strict", "skip"))
    check_choice("deadline", deadline, ("adaptive", "fixed"))
    check_choice("weighting", weighting, ("equal", "tokens"))
    check_choice("buffers", buffers, ("average", "local"))
    check_choice("validate_with", validate_with, ("local", "shared"))
    for name, seconds in (("timeout", timeout), ("start_timeout", start_timeout)):
        if isinstance(seconds, bool) or not isinstance(seconds, Real) or not float(seconds) > 0:
            raise ValueError(f"{name} must be a positive number of seconds, got {seconds!r}")
    check_whole("checkpoint_every_rounds", checkpoint_every_rounds, least=1)
    for name, number, least in (
        ("checkpoint_every", checkpoint_every, 1),
        ("min_replicas", min_replicas, None),
        ("optimizer", optimizer, 0),
        ("pad_token_id", pad_token_id, None),
    ):
        if number is not None:
            check_whole(name, number, least=least)
    if not isinstance(run, str):
        raise ValueError(f"run must be a name, got {run!r}")
    if collective is not None and store is not None:
        raise ValueError("give a store or a collective, not both")
    if collective is not None and control is not None:
        raise ValueError("control is a second store: it comes with a store, not with a collective")
    check_codec(codec)
    if collective is not None:
        identity, meet = given_collective(collective, replica=replica, replicas=replicas)
    else:
        _refuse_contradictions(replica=replica, replicas=replicas)
        identity = read_identity(replica=replica, replicas=replicas, launcher=launcher)
        if identity.replica >= identity.replicas and replica_failure_policy != "skip":
            raise ValueError(
                f"replica must be between 0 and {identity.replicas - 1} in a fleet of {identity.replicas}, got "
                f"{identity.replica} (further ones may join only under replica_failure_policy='skip')"
            )
        if min_replicas is not None and not 1 <= min_replicas <= identity.replicas:
            raise ValueError(f"min_replicas must be between 1 and {identity.replicas}, got {min_replicas!r}")
        meet = open_store(
            store,
            identity,
            control=control,
            run=run,
            interrupted=interrupted,
            codec=codec,
            failure_policy=replica_failure_policy,
            min_replicas=min_replicas,
            timeout_seconds=timeout,
            start_timeout_seconds=start_timeout,
            deadline=deadline,
            checkpoint_every=checkpoint_every,
        )
    return Options(
        identity=identity,
        meet=meet,
        policy=made,
        outer=outer_config,
        outer_device=outer_device,
        weighting=weighting,
        buffers=buffers,
        optimizer=optimizer,
        pad_token_id=pad_token_id,
        token_fn=token_fn,
        validate_with=validate_with,
        checkpoint_dir=None if checkpoint_dir is None else Path(checkpoint_dir),
        checkpoint_every_rounds=checkpoint_every_rounds,
    )


def _refuse_contradictions(**given: int | None) -> None:
    """An argument that says otherwise than the environment: one of the two was meant for another process."""
    for name, variable in (("replica", REPLICA), ("replicas", REPLICAS)):
        value, found = given[name], os.environ.get(variable, "").strip()
        if value is not None and found and str(value) != found:
            raise ValueError(
                f"{name}={value} contradicts {variable}={found}, which the launcher or the environment says: "
                f"leave {name} out, or unset the variable"
            )
