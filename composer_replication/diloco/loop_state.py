"""What a loop's `state_dict` holds, and whether a given one may be resumed from.

Invariant: the keys are a contract, with a version; a state that can't be read is refused before anything is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from composer_replication.collective.base import RoundOutcome
from composer_replication.errors import FleetMismatch

__all__ = ["STATE_KEYS", "STATE_VERSION", "Totals", "check_state"]

STATE_VERSION = 1
STATE_KEYS = (
    *("version", "replica", "settings", "layout", "anchor", "momentum", "shared", "digest", "trained", "interval"),
    *("totals", "left", "ended"),
)


@dataclass(slots=True, kw_only=True)
class Totals:
    """Of one replica, over the whole run."""

    intervals_lost: int = 0  # decided without it, or not finite
    wait_seconds: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0

    def add(self, outcome: RoundOutcome) -> None:
        self.wait_seconds += outcome.wait_seconds
        self.bytes_sent += outcome.bytes_sent
        self.bytes_received += outcome.bytes_received


def check_state(state: Mapping[str, Any], replica: int) -> None:
    """Raises KeyError or FleetMismatch if `replica` can't resume from what `state_dict()` gave."""
    if state["version"] != STATE_VERSION:
        raise FleetMismatch(f"outer-loop state of version {state['version']}, this package reads {STATE_VERSION}")
    if state["replica"] != replica:
        raise FleetMismatch(
            f"a checkpoint of replica {state['replica']} can't resume replica {replica}: give each replica its own"
        )
    if missing := set(STATE_KEYS) - set(state):
        raise KeyError(f"the outer-loop state lacks {sorted(missing)}")
