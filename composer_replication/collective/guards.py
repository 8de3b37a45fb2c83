"""What a fleet does about contributions that it shouldn't trust: settings that all replicas share.

Invariant: frozen, checked at construction. Who is averaged and how follows from these settings and the round's reports
alone (membership.py), so that every collective decides alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["AGGREGATIONS", "OUTLIERS", "ROBUST_LEAST", "Guards"]

OUTLIERS = ("warn", "clip", "exclude", "off")
AGGREGATIONS = ("mean", "median", "trimmed_mean")
ROBUST_LEAST = 3  # of fewer values none can be told to be the odd one out


@dataclass(frozen=True, kw_only=True)
class Guards:
    """How outliers are treated, and what kind of mean is taken (docs/method.md, "Replicas that can't be trusted").

    Args:
        outliers: what becomes of a contribution whose norm is an outlier of its round: "warn" says so, "clip" scales
            it down to the bound, "exclude" averages the others, "off" does nothing. Norms of more than 1,000 times the
            median one are left out in any case.
        outlier_threshold: robust z-score (distance from the median, in units of 1.4826 median absolute deviations)
            above which a norm is an outlier, if it is more than twice the median, too.
        aggregation: "mean"; or, coordinate by coordinate, "median" or "trimmed_mean", which a minority of wrong
            contributions can't carry away (Yin et al., 2018, "Byzantine-Robust Distributed Learning").
        trim_fraction: of "trimmed_mean": which part of the members' values is cut away at each end, rounded up.

    Raises ValueError that names the field.
    """

    outliers: Literal["warn", "clip", "exclude", "off"] = "warn"
    outlier_threshold: float = 3.5
    aggregation: Literal["mean", "median", "trimmed_mean"] = "mean"
    trim_fraction: float = 0.1

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("outliers", self.outliers, OUTLIERS),
            ("aggregation", self.aggregation, AGGREGATIONS),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
        if not _number(self.outlier_threshold) or not 0.0 < self.outlier_threshold < math.inf:
            raise ValueError(f"outlier_threshold must be a positive number, got {self.outlier_threshold!r}")
        if not _number(self.trim_fraction) or not 0.0 < self.trim_fraction < 0.5:
            raise ValueError(f"trim_fraction must be between 0 and 0.5, got {self.trim_fraction!r}")

    @property
    def robust(self) -> bool:
        return self.aggregation != "mean"

    def trim(self, members: int) -> int | None:
        """How many of `members` values are cut away at each end of their order; None: the plain mean, unsorted."""
        if not self.robust:
            return None
        most = (members - 1) // 2
        if self.aggregation == "median":
            return most
        # A product that is a whole number but for its rounding isn't rounded up to the next one.
        return min(math.ceil(self.trim_fraction * members - 1e-9), most)

    def check_fleet(self, replicas: int) -> None:
        """Raise ValueError if so few replicas can't outvote a wrong one."""
        if self.robust and replicas < ROBUST_LEAST:
            raise ValueError(
                f"aggregation={self.aggregation!r} needs at least {ROBUST_LEAST} replicas, got {replicas}: of two "
                "values none can be told to be the wrong one"
            )

    @property
    def least(self) -> int:
        """How many members a round needs."""
        return ROBUST_LEAST if self.robust else 1

    def check_least(self, min_replicas: int | None) -> None:
        """Raise ValueError if a round may close with so few that they can't outvote a wrong one."""
        if min_replicas is not None and min_replicas < self.least:
            raise ValueError(
                f"min_replicas must be at least {self.least} with aggregation={self.aggregation!r}, got "
                f"{min_replicas}: fewer replicas can't outvote a wrong one"
            )

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError if the loop's settings don't go with these."""
        if self.robust and settings.get("weighting", "equal") != "equal":
            raise ValueError(
                f"weighting={settings['weighting']!r} doesn't go with aggregation={self.aggregation!r}, in which every "
                "replica has one vote (tokens are what a replica says of itself): use weighting='equal'"
            )

    def to_json(self) -> dict[str, Any]:
        """For the fleet to compare: what has no effect is left out."""
        values = asdict(self)
        if self.outliers == "off":
            del values["outlier_threshold"]
        if self.aggregation != "trimmed_mean":
            del values["trim_fraction"]
        return {name: float(value) if _number(value) else value for name, value in values.items()}


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
