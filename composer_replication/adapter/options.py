"""The options that every adapter takes, by the same names: read once, checked at construction.

Invariant: what can't work is a ValueError that names the option, before anything is opened or trained.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
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
from composer_replication.collective.guards import Guards
from composer_replication.collective.retention import CHECKPOINT_EVERY, check_own_checkpoints
from composer_replication.isolate import REPLICA, REPLICAS, Identity, read_identity
from composer_replication.store.signing_key import find_signing_key

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
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    normalize: bool = False,
    codec: str = "float32",
    replica_failure_policy: Literal["strict", "skip"] = "strict",
    min_replicas: int | None = None,
    timeout: float = 600.0,
    start_timeout: float | None = None,
    deadline: Literal["adaptive", "fixed"] = "adaptive",
    outliers: Literal["warn", "clip", "exclude", "off"] = "warn",
    outlier_threshold: float = 3.5,
    aggregation: Literal["mean", "median", "trimmed_mean"] = "mean",
    trim_fraction: float = 0.1,
    signing_key_file: str | os.PathLike[str] | None = None,
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
        if name == "start_timeout" and seconds is None:
            continue
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
    guards = Guards(
        outliers=outliers, outlier_threshold=outlier_threshold, aggregation=aggregation, trim_fraction=trim_fraction
    )
    guards.check_settings({"weighting": weighting})
    if signing_key_file is not None and not isinstance(signing_key_file, (str, os.PathLike)):
        raise ValueError(f"signing_key_file must be the name of a file, got a {type(signing_key_file).__name__}")
    if collective is not None:
        _refuse_of_the_store(
            launcher=launcher,
            run=run,
            codec=codec,
            replica_failure_policy=replica_failure_policy,
            min_replicas=min_replicas,
            timeout=timeout,
            start_timeout=start_timeout,
            deadline=deadline,
            outliers=outliers,
            outlier_threshold=outlier_threshold,
            aggregation=aggregation,
            trim_fraction=trim_fraction,
            signing_key_file=signing_key_file,
            checkpoint_every=checkpoint_every,
        )
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
        guards.check_fleet(identity.replicas)
        guards.check_least(min_replicas)
        if checkpoint_dir is not None:
            shared = CHECKPOINT_EVERY if checkpoint_every is None else checkpoint_every
            names = {"own_name": "checkpoint_every_rounds", "shared_name": "checkpoint_every"}
            check_own_checkpoints(checkpoint_every_rounds, shared, **names)
        find_signing_key(signing_key_file)  # read again when a fit begins: nothing here holds it
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
            guards=guards,
            signing_key=signing_key_file,
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


def _refuse_of_the_store(**given: Any) -> None:
    """A ready collective has its own settings: an argument about the rounds would have no effect."""
    defaults = signature(read_options).parameters
    without_effect = [name for name, value in given.items() if value != defaults[name].default]
    if without_effect:
        raise ValueError(
            f"{', '.join(without_effect)} can't be given together with collective=, which has settings of its own: "
            "give them to the collective when you make it, or give store= instead"
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
