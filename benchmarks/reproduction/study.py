"""What the small-scale reproduction runs: variants of one recipe, as groups of `key=value` overrides.

Invariant: a run is named by (group, variant, seed), and everything else about it stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["DEBIAN_TEXT", "GROUPS", "KEPT", "RECIPE", "SEEDS", "Group", "Variant"]

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "reproduction.yaml"
KEPT = ROOT / "docs" / "results" / "reproduction"
SEEDS = (1, 2, 3)
DEBIAN_TEXT = "benchmarks/reproduction/debian"  # debian_text.py makes it


@dataclass(frozen=True)
class Variant:
    """One line of a table."""

    title: str
    overrides: tuple[str, ...] = ()
    disturbance: str | None = None  # a name in disturbances.py
    data_parallel: bool = False


@dataclass(frozen=True)
class Group:
    """One table. `overrides` go before the variants' own."""

    title: str
    variants: Mapping[str, Variant]
    overrides: tuple[str, ...] = ()
    seeds: tuple[int, ...] = field(default=SEEDS)


def _policy(name: str, *more: str) -> tuple[str, ...]:
    return (f"autoloco.policy={name}", *(f"autoloco.{one}" for one in more))


DILOCO = Variant("DiLoCo, momentum 0.9", _policy("fixed"))
DILOCO_07 = Variant("DiLoCo, momentum 0.7", _policy("fixed", "outer_momentum=0.7"))
AUTOLOCO = Variant("AutoLoCo")
DDP = Variant("data parallel (DDP)", data_parallel=True)

MAIN = {
    "ddp": DDP,
    "diloco": DILOCO,
    "diloco-0.7": DILOCO_07,
    "average": Variant("direct averaging, fixed", _policy("fixed", "outer_lr=1.0", "outer_momentum=0.0")),
    "qsr": Variant("QSR", _policy("qsr")),
    "linear": Variant("Linear-Interval, +1", _policy("linear", "increment=1")),
    "staircase": Variant("staircase (no classifier)", _policy("staircase")),
    "intervals": Variant("adaptive intervals alone", _policy("autoloco", "adapt_momentum=false", "adapt_lr=false")),
    "momentum": Variant("intervals + momentum", _policy("autoloco", "adapt_lr=false")),
    "autoloco": Variant("AutoLoCo (intervals + momentum + step)"),
    "normalised": Variant("AutoLoCo, normalised", _policy("autoloco", "normalize=true")),
    "autoloco-0.9": Variant("AutoLoCo, base momentum 0.9", _policy("autoloco", "outer_momentum=0.9")),
}
EIGHT = {name: MAIN[name] for name in ("diloco", "diloco-0.7", "autoloco", "autoloco-0.9")}
PROSE = {name: MAIN[name] for name in EIGHT}
CODECS = {
    "bfloat16": Variant("AutoLoCo, bfloat16", ("codec=bfloat16",)),
    "int8": Variant("AutoLoCo, int8", ("codec=int8",)),
    "diloco-int8": Variant("DiLoCo, momentum 0.9, int8", (*_policy("fixed"), "codec=int8")),
}


def _disturbed(what: str) -> dict[str, Variant]:
    return {
        name: Variant(MAIN[name].title, MAIN[name].overrides, disturbance=what)
        for name in ("diloco-0.7", "staircase", "autoloco")
    }


SENSITIVITY = {
    "scale-none": Variant("s_max none", _policy("autoloco", "max_scale=null")),
    "thresholds-half": Variant(
        "thresholds × 0.5",
        _policy(
            "autoloco",
            "supporting_threshold=0.5",
            "consistent_threshold=1.25",
            "moderate_threshold=2.5",
        ),
    ),
    "thresholds-double": Variant(
        "thresholds × 2",
        _policy(
            "autoloco",
            "supporting_threshold=2.0",
            "consistent_threshold=5.0",
            "moderate_threshold=10.0",
        ),
    ),
    "cap-1.10": Variant("growth cap 1.10", _policy("autoloco", "growth_cap=1.10")),
    "cap-1.30": Variant("growth cap 1.30", _policy("autoloco", "growth_cap=1.30")),
    "reach-2": Variant("max horizon 2 × base", _policy("autoloco", "max_horizon=40")),
    "floor-0.05": Variant("scale floor 0.05", _policy("autoloco", "scale_floor=0.05")),
    "floor-0.10": Variant("scale floor 0.10", _policy("autoloco", "scale_floor=0.10")),
}

GROUPS: dict[str, Group] = {
    "main": Group("Four replicas", MAIN),
    "eight": Group("Eight replicas", EIGHT, overrides=("fleet.replicas=8",)),
    "prose": Group("Another text", PROSE, overrides=(f"data.args.path={DEBIAN_TEXT}", "data.args.pattern='*.txt'")),
    "codecs": Group("Codecs", CODECS),
    "spike": Group("A learning-rate spike", _disturbed("spike")),
    "shift": Group("A shift of the data", _disturbed("shift")),
    "sensitivity": Group("Sensitivity of AutoLoCo", SENSITIVITY),
}
