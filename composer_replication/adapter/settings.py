"""An adapter's keyword arguments, made into the frozen values that the core takes.

Invariant: a name that nothing takes is refused, with the nearest name that something does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from numbers import Integral
from typing import Any

from composer_replication.autoloco.config import AutoLoCoConfig, OuterConfig
from composer_replication.autoloco.policies import make_policy
from composer_replication.autoloco.values import Policy

__all__ = ["check_choice", "check_whole", "make_settings"]

_HORIZON = frozenset(field.name for field in fields(AutoLoCoConfig))
_OUTER = {"outer_lr": "lr", "outer_momentum": "momentum", "outer_kind": "kind"} | {
    name: name for name in ("momentum_min", "momentum_max", "max_scale", "normalize", "adapt_momentum", "adapt_lr")
}
_POLICY = frozenset({"alpha", "peak_lr", "increment"})


def make_settings(policy: str | Policy, options: Mapping[str, Any]) -> tuple[Policy, OuterConfig]:
    """(policy, outer settings). Raises ValueError that names the option."""
    for name in options:
        if name not in _HORIZON and name not in _OUTER and name not in _POLICY:
            close = get_close_matches(name, [*_HORIZON, *_OUTER, *_POLICY], n=1)
            raise ValueError(f"there is no option {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    horizon = {name: value for name, value in options.items() if name in _HORIZON and value is not None}
    outer = {_OUTER[name]: value for name, value in options.items() if name in _OUTER}
    own = {name: value for name, value in options.items() if name in _POLICY and value is not None}
    if not isinstance(policy, str):
        given = sorted([*horizon, *own])
        if given:
            raise ValueError(f"policy is ready-made, so {', '.join(given)} must be left out")
        made = policy
        return made, _resolvable(OuterConfig(**outer), made)
    if policy == "linear":
        horizon.setdefault("base_horizon", 1)  # it has none
    if "base_horizon" not in horizon:
        raise ValueError("base_horizon is missing: how many optimizer steps a replica trains alone, e.g. 500")
    made = make_policy(policy, AutoLoCoConfig(**horizon), **own)
    return made, _resolvable(OuterConfig(**outer), made)


def _resolvable(outer: OuterConfig, policy: Policy) -> OuterConfig:
    outer.resolved(policy.name)  # a ValueError here, rather than when training begins
    return outer


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be {' or '.join(repr(a) for a in allowed)}, got {value!r}")


def check_whole(name: str, value: object, *, least: int | None) -> None:
    """Refuse what isn't an int of at least `least`; a bool, or a number in quotes, isn't."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if least is not None and int(value) < least:
        raise ValueError(f"{name} must be at least {least}, got {value!r}")
