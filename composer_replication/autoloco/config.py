"""Settings of the horizon controller and of the outer step.

Invariant: frozen, checked at construction; a value that can't work is a ValueError that names the
field and the value.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import isfinite
from typing import Any

__all__ = ["OUTER_KINDS", "AutoLoCoConfig", "OuterConfig"]

OUTER_KINDS = ("nesterov", "average")

_AVERAGING_POLICIES = frozenset({"qsr", "linear"})
_OUTER_LR = 0.7
_FIXED_MOMENTUM = 0.9
_ADAPTIVE_MOMENTUM = 0.7


def _refuse(field: str, value: object, wanted: str) -> ValueError:
    return ValueError(f"{field} must be {wanted}, not {value!r}")


def _check_int(field: str, value: object, lowest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise _refuse(field, value, f"a whole number of at least {lowest}")


def _check_float(
    field: str, value: object, low: float, high: float, *, low_open: bool = False, high_open: bool = False
) -> None:
    """Refuse anything but a finite number between `low` and `high`."""
    good = (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and isfinite(value)
        and (low < value if low_open else low <= value)
        and (value < high if high_open else value <= high)
    )
    if not good:
        span = f"{'(' if low_open else '['}{low:g}, {high:g}{')' if high_open or high == float('inf') else ']'}"
        raise _refuse(field, value, f"a number in {span}")


def _check_bool(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise _refuse(field, value, "true or false")


@dataclass(frozen=True, kw_only=True)
class AutoLoCoConfig:
    """How the horizon may move. Horizons are in token-equivalent steps (paper, appendix A; docs/method.md).

    The admissible horizons are `base_horizon + k * horizon_step` for whole k, within
    [`min_horizon`, `max_horizon`].
    """

    base_horizon: int
    min_horizon: int | None = None  # None: half of the base horizon
    max_horizon: int | None = None  # None: one and a half times the base horizon, rounded down
    horizon_step: int | None = None  # None: a tenth of the base horizon, at least 1
    warmup_steps: int = 0  # inner learning-rate warm-up; the base horizon is kept meanwhile
    growth_cap: float = 1.15  # a longer interval's learning-rate mass over the accepted one's, at most
    retire_ratio: float = 0.90  # a rejected bound is forgotten when its mass has fallen to this share
    moderate_cut: float = 1.20  # the horizon is divided by this after two moderate deviations in a row
    severe_cut: float = 1.50  # ... and by this after a severe one
    history: int = 16  # residuals kept
    supporting_threshold: float = 1.0  # adverse score up to which an interval supports an increase
    consistent_threshold: float = 2.5  # ... is consistent with the reference
    moderate_threshold: float = 5.0  # ... deviates moderately; beyond it, severely
    scale_floor: float = 0.15  # least scale of a residual, in natural-log units
    reference_weight: float = 0.1  # weight of the newest interval in the references
    token_decay: float = 0.9  # weight of the past in the tokens-per-step estimate

    def __post_init__(self) -> None:
        _check_int("base_horizon", self.base_horizon, 1)
        for field in ("min_horizon", "max_horizon", "horizon_step"):
            value = getattr(self, field)
            if value is not None:
                _check_int(field, value, 1)
        if self.shortest > self.base_horizon:
            raise _refuse("min_horizon", self.min_horizon, f"at most base_horizon ({self.base_horizon})")
        if self.longest < self.base_horizon:
            raise _refuse("max_horizon", self.max_horizon, f"at least base_horizon ({self.base_horizon})")
        _check_int("warmup_steps", self.warmup_steps, 0)
        _check_float("growth_cap", self.growth_cap, 1.0, float("inf"), low_open=True)
        _check_float("retire_ratio", self.retire_ratio, 0.0, 1.0, low_open=True)
        _check_float("moderate_cut", self.moderate_cut, 1.0, float("inf"), low_open=True)
        _check_float("severe_cut", self.severe_cut, self.moderate_cut, float("inf"))
        _check_int("history", self.history, 3)
        _check_float("supporting_threshold", self.supporting_threshold, 0.0, float("inf"), low_open=True)
        _check_float("consistent_threshold", self.consistent_threshold, self.supporting_threshold, float("inf"))
        _check_float("moderate_threshold", self.moderate_threshold, self.consistent_threshold, float("inf"))
        _check_float("scale_floor", self.scale_floor, 0.0, float("inf"), low_open=True)
        _check_float("reference_weight", self.reference_weight, 0.0, 1.0, low_open=True)
        _check_float("token_decay", self.token_decay, 0.0, 1.0, high_open=True)

    @property
    def shortest(self) -> int:
        """The lower bound in force."""
        return self.min_horizon if self.min_horizon is not None else (self.base_horizon + 1) // 2

    @property
    def longest(self) -> int:
        """The upper bound in force."""
        return self.max_horizon if self.max_horizon is not None else self.base_horizon * 3 // 2

    @property
    def spacing(self) -> int:
        """The distance between neighbouring horizons in force."""
        return self.horizon_step if self.horizon_step is not None else max(1, self.base_horizon // 10)

    @cached_property
    def horizons(self) -> tuple[int, ...]:
        """The admissible horizons, ascending; the base horizon is always among them."""
        below = (self.base_horizon - self.shortest) // self.spacing
        above = (self.longest - self.base_horizon) // self.spacing
        return tuple(self.base_horizon + k * self.spacing for k in range(-below, above + 1))

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """The step counts that a horizon may map to: base + k * spacing, from above 0 to four times the upper bound.

        The upper end is a choice: it bounds what is previewed each round, and an interval can't be
        stretched further however thin the batches get.
        """
        first = (self.base_horizon - 1) % self.spacing + 1
        return tuple(range(first, 4 * self.longest + 1, self.spacing))

    def settings(self) -> dict[str, Any]:
        """Plain JSON values, with every default filled in, so that equal behaviour gives equal settings."""
        values = asdict(self)
        values.update(min_horizon=self.shortest, max_horizon=self.longest, horizon_step=self.spacing)
        return values


@dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """The outer step: base coefficients, and how they follow the interval (paper, section 3.2, appendix B)."""

    kind: str | None = None  # "nesterov" or "average"; None: the policy's own
    lr: float | None = None  # None: 0.7; with kind "average" it is 1
    momentum: float | None = None  # None: the policy's own
    momentum_min: float = 0.5
    momentum_max: float = 0.95
    max_scale: float | None = 1.5  # bound on the growth of the outer learning rate; None: unbounded
    normalize: bool = False  # divide the averaged pseudo-gradient by rho
    adapt_momentum: bool = True
    adapt_lr: bool = True

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in OUTER_KINDS:
            raise _refuse("kind", self.kind, " or ".join(repr(kind) for kind in OUTER_KINDS))
        if self.lr is not None:
            _check_float("lr", self.lr, 0.0, float("inf"), low_open=True)
        if self.momentum is not None:
            _check_float("momentum", self.momentum, 0.0, 1.0, high_open=True)
        _check_float("momentum_min", self.momentum_min, 0.0, 1.0, high_open=True)
        _check_float("momentum_max", self.momentum_max, self.momentum_min, 1.0, high_open=True)
        if self.max_scale is not None:
            _check_float("max_scale", self.max_scale, 1.0, float("inf"))
        for field in ("normalize", "adapt_momentum", "adapt_lr"):
            _check_bool(field, getattr(self, field))
        if self.kind == "average" and self.momentum:
            raise ValueError(
                f"momentum must be left out with kind 'average' (plain model averaging), not {self.momentum!r}"
            )
        if self.kind == "average":
            self._check_averaging("kind 'average'")

    def _check_averaging(self, what: str) -> None:
        if self.lr not in (None, 1.0):
            raise ValueError(
                f"lr must be left out with {what} (plain model averaging, outer learning rate 1), not {self.lr!r}"
            )

    @property
    def base_lr(self) -> float:
        """The outer learning rate before it is adapted."""
        return _OUTER_LR if self.lr is None else self.lr

    def resolved(self, policy: str) -> OuterConfig:
        """The same with `kind` and `momentum` filled in for a policy of that name.

        "qsr" and "linear" average the replicas' weights (outer learning rate 1, no momentum), as in the
        paper (appendix E.2); "fixed" takes momentum 0.9 (DiLoCo), the adaptive ones 0.7 (appendix E.4).
        """
        kind = self.kind or ("average" if policy in _AVERAGING_POLICIES else "nesterov")
        if kind == "average":
            self._check_averaging(f"policy {policy!r} and kind {self.kind!r}")
            return replace(self, kind=kind, lr=1.0, momentum=self.momentum or 0.0)
        own = _FIXED_MOMENTUM if policy == "fixed" else _ADAPTIVE_MOMENTUM
        momentum = own if self.momentum is None else self.momentum
        return replace(self, kind=kind, lr=self.base_lr, momentum=momentum)
