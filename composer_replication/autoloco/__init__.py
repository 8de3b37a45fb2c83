"""When to synchronise, and how hard to step: decisions only.

Invariant: standard library only; no tensor, no clock, no file. Everything is a frozen value or a pure
function, so that replicas which saw the same rounds decide alike without a message.
"""

from __future__ import annotations

from composer_replication.autoloco.config import AutoLoCoConfig, OuterConfig
from composer_replication.autoloco.controller import AutoLoCoState
from composer_replication.autoloco.outer import OuterCoefficients, mass_ratio, outer_coefficients
from composer_replication.autoloco.policies import (
    POLICIES,
    AutoLoCoPolicy,
    FixedPolicy,
    LinearPolicy,
    QSRPolicy,
    StaircasePolicy,
    make_policy,
)
from composer_replication.autoloco.schedule import (
    ScheduleRun,
    cosine_rates,
    fixed_intervals,
    linear_rates,
    run_lengths,
    run_schedule,
    schedule_rates,
)
from composer_replication.autoloco.values import Observation, Plan, Policy, Preview

__all__ = [
    "POLICIES",
    "AutoLoCoConfig",
    "AutoLoCoPolicy",
    "AutoLoCoState",
    "FixedPolicy",
    "LinearPolicy",
    "Observation",
    "OuterCoefficients",
    "OuterConfig",
    "Plan",
    "Policy",
    "Preview",
    "QSRPolicy",
    "ScheduleRun",
    "StaircasePolicy",
    "cosine_rates",
    "fixed_intervals",
    "linear_rates",
    "make_policy",
    "mass_ratio",
    "outer_coefficients",
    "run_lengths",
    "run_schedule",
    "schedule_rates",
]
