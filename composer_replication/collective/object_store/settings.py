"""A collective's settings, checked, as the values that its parts take.

Invariant: what is out of range is a ValueError that names the setting, before anything is opened or written.
"""

from __future__ import annotations

from composer_replication.collective.guards import Guards
from composer_replication.collective.object_store.deadline import Patience
from composer_replication.collective.object_store.roster import Mode, Policy

__all__ = ["check_positive", "make_patience", "make_policy"]


def make_policy(
    *,
    replica: int,
    replicas: int,
    failure_policy: str,
    min_replicas: int | None,
    tolerated_misses: int,
    mode: Mode,
    guards: Guards,
) -> Policy:
    """The fleet's rules of membership, for this replica."""
    if replicas < 1:
        raise ValueError(f"replicas must be at least 1, got {replicas}")
    if not 0 <= replica < replicas and (replica < 0 or failure_policy == "strict"):
        raise ValueError(
            f"replica must be from 0 to {replicas - 1} in a fleet of {replicas}, got {replica}"
            + (" (further ones may join only under failure_policy='skip')" if replica >= 0 else "")
        )
    if failure_policy not in ("strict", "skip"):
        raise ValueError(f"failure_policy must be 'strict' or 'skip', got {failure_policy!r}")
    if min_replicas is not None and not 1 <= min_replicas <= replicas:
        raise ValueError(f"min_replicas must be from 1 to {replicas}, got {min_replicas}")
    guards.check_fleet(replicas)
    guards.check_least(min_replicas)
    if mode not in ("auto", "direct", "sharded"):
        raise ValueError(f"mode must be 'auto', 'direct' or 'sharded', got {mode!r}")
    if tolerated_misses < 0:
        raise ValueError(f"tolerated_misses must not be negative, got {tolerated_misses}")
    return Policy(
        strict=failure_policy == "strict",
        fleet=tuple(range(replicas)),
        min_replicas=min_replicas if min_replicas is not None else max(replicas // 2 + 1, guards.least),
        tolerated_misses=tolerated_misses,
        mode=mode,
        guards=guards,
    )


def make_patience(deadline: str, policy: Policy, floor_seconds: float, timeout_seconds: float) -> Patience | None:
    """None: every wait lasts `timeout_seconds`."""
    if deadline not in ("adaptive", "fixed"):
        raise ValueError(f"deadline must be 'adaptive' or 'fixed', got {deadline!r}")
    if policy.strict or deadline == "fixed":
        return None
    return Patience(floor_seconds=floor_seconds, ceiling_seconds=timeout_seconds)


def check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be greater than 0, got {value}")
