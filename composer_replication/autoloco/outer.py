"""The outer step's coefficients for one interval (paper, section 3.2, appendices B and C.3). Plain floats.

Invariant: an interval whose learning-rate mass is the base interval's gets the base coefficients, bit
for bit (paper, appendix D.2: rho = 1 gives DiLoCo).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from composer_replication.autoloco.config import OuterConfig

__all__ = ["EPSILON", "OuterCoefficients", "mass_ratio", "outer_coefficients"]

# Guards a division by zero and vanishes in double precision against any learning rate or norm that trains.
EPSILON = 1e-30


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterCoefficients:
    """m <- momentum * m + g;  parameters <- parameters - lr * (g + momentum * m), with g = mean / divisor."""

    rho: float
    momentum: float
    lr: float
    divisor: float


def mass_ratio(mass: float, base_mass: float) -> float:
    """rho: how many base intervals this one stands for, at least 1 (paper, appendix C.2).

    1 as well when the base interval has no mass (a learning rate of zero): there is nothing to compare with.
    """
    if not (isfinite(mass) and isfinite(base_mass) and base_mass > 0.0):
        return 1.0
    return max(mass / (base_mass + EPSILON), 1.0)


def outer_coefficients(config: OuterConfig, momentum: float, mass: float, base_mass: float) -> OuterCoefficients:
    """Coefficients for an interval of previewed learning-rate mass `mass`; `momentum` is the base momentum in force.

    The momentum is `momentum ** rho` between `momentum_min` and `momentum_max`; a base momentum that
    lies outside these bounds widens them to itself, so that rho = 1 changes nothing and the
    coefficients are continuous there. The learning rate keeps lr / (1 - momentum) in proportion to rho, up
    to `max_scale` times the base.
    """
    if config.kind == "average":
        return OuterCoefficients(rho=1.0, momentum=0.0, lr=1.0, divisor=1.0)
    rho = mass_ratio(mass, base_mass)
    if rho == 1.0:
        return OuterCoefficients(rho=1.0, momentum=momentum, lr=config.base_lr, divisor=1.0)
    low, high = min(config.momentum_min, momentum), max(config.momentum_max, momentum)
    retained = min(max(momentum**rho, low), high) if config.adapt_momentum else momentum
    scale = 1.0
    if config.adapt_lr:
        scale = rho * (1.0 - retained) / (1.0 - momentum)
        if config.max_scale is not None:
            scale = min(scale, config.max_scale)
    return OuterCoefficients(
        rho=rho,
        momentum=retained,
        lr=config.base_lr * scale,
        divisor=rho + EPSILON if config.normalize else 1.0,
    )
