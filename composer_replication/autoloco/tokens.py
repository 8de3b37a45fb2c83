"""From a horizon in token-equivalent steps to inner steps, at the present density of the batches.

Invariant: what comes out is a positive member of the config's grid, and the horizon itself until three
base-horizon intervals have been counted (paper, appendix A.3 and equation 5).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from composer_replication.autoloco.config import AutoLoCoConfig
from composer_replication.autoloco.values import Observation

__all__ = ["TokenMapper", "nearest"]

_BASE_INTERVALS = 3


def nearest(values: Sequence[int], target: float) -> int:
    """The member of ascending `values` that is closest to `target`; the smaller of two equally close."""
    index = bisect_left(values, target)
    if index == 0:
        return values[0]
    if index == len(values):
        return values[-1]
    low, high = values[index - 1], values[index]
    return low if target - low <= high - target else high


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMapper:
    """What has been counted so far. All counts are per replica, so that a change of roster changes nothing."""

    base_intervals: tuple[float, ...] = ()  # tokens of a base-horizon interval, the first three
    rate: float | None = None  # tokens in one inner step, smoothed

    @property
    def calibrated(self) -> bool:
        return len(self.base_intervals) == _BASE_INTERVALS and self.rate is not None

    def observe(self, config: AutoLoCoConfig, seen: Observation, *, at_base: bool) -> TokenMapper:
        """Take in a whole interval. One without a token count, or without steps, teaches nothing."""
        if not seen.tokens or seen.tokens < 0 or seen.steps < 1 or seen.roster < 1:
            return self
        present = seen.tokens / seen.steps
        decay = config.token_decay
        mapper = replace(self, rate=present if self.rate is None else decay * self.rate + (1.0 - decay) * present)
        if at_base and len(self.base_intervals) < _BASE_INTERVALS:
            mapper = replace(mapper, base_intervals=(*self.base_intervals, seen.tokens / seen.roster))
        return mapper

    def steps(self, config: AutoLoCoConfig, horizon: int) -> int:
        """The inner steps that take as many tokens as `horizon` base steps did (at most the grid's last value)."""
        if not self.calibrated or self.rate is None:
            return horizon
        base_tokens = sorted(self.base_intervals)[_BASE_INTERVALS // 2]
        return nearest(config.grid, horizon * (base_tokens / config.base_horizon) / self.rate)

    def to_dict(self) -> dict[str, Any]:
        return {"base_intervals": list(self.base_intervals), "rate": self.rate}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> TokenMapper:
        rate = data["rate"]
        return TokenMapper(
            base_intervals=tuple(float(tokens) for tokens in data["base_intervals"]),
            rate=None if rate is None else float(rate),
        )
