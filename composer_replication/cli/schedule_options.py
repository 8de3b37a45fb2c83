"""The options of `schedule`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

__all__ = ["DEFAULT_BANDWIDTH", "DEFAULTS", "OVERRIDES", "add_schedule"]

DEFAULT_BANDWIDTH = 1000.0  # Mbit/s
# Of the options that describe a run without a recipe; None where one isn't given, so that it can be told.
DEFAULTS = {"warmup": 0, "decay": "cosine", "final_fraction": 0.0, "policy": "autoloco", "peak_lr": 1.0}
# What is put over a recipe instead of each of those options.
OVERRIDES = {
    "steps": "training.steps",
    "base": "autoloco.base_horizon",
    "warmup": "scheduler.warmup_steps",
    "decay": "scheduler.name",
    "final_fraction": "scheduler.final_fraction",
    "policy": "autoloco.policy",
    "peak_lr": "optimizer.lr",
    "alpha": "autoloco.alpha",
    "increment": "autoloco.increment",
    "min": "autoloco.min_horizon",
    "max": "autoloco.max_horizon",
    "step": "autoloco.horizon_step",
    "growth_cap": "autoloco.growth_cap",
}

_EPILOG = """\
examples:
  composer-replication schedule recipes/c4-215m/autoloco.yaml --bandwidth 500 --step-seconds 1.2
  composer-replication schedule recipes/ultrachat-8b/autoloco.yaml --parameters 8.03B codec=int8
  composer-replication schedule --steps 50000 --base 500 --warmup 1000
  composer-replication schedule --steps 6490 --base 100 --warmup 200 --decay linear --json
  composer-replication schedule --steps 50000 --base 500 --warmup 1000 --policy qsr

Of a recipe it shows the optimizer, the learning rate, the outer step and the bytes as well. It needs neither the data
nor a GPU, and of a model that is on the Hub only its config (or --parameters).

Every interval is taken to support an increase: the adaptive policy's rounds are the least that a run can come to.
The last interval is cut to what the steps leave.
"""


def add_schedule(command: Callable[[str, str, str], argparse.ArgumentParser]) -> None:
    parser = command("schedule", "show the intervals that a policy, or a recipe, would run", _EPILOG)
    add = parser.add_argument
    add("recipe", nargs="?", metavar="RECIPE", help="a YAML file; else --steps and --base")
    add("overrides", nargs="*", metavar="key=value", help="put over the recipe")
    add("--bandwidth", type=float, default=DEFAULT_BANDWIDTH, metavar="MBIT", help="of each replica (default 1000)")
    add("--parameters", metavar="N", help="size of the model, e.g. 8.03B, if the recipe can't tell")
    add("--step-seconds", type=float, metavar="S", help="what an optimizer step takes on one replica")
    add("--json", action="store_true", help='for programs: {"rounds": 73, "horizons": [500, ...]}, of a recipe more')
    without = parser.add_argument_group("without a recipe")
    add = without.add_argument
    add("--steps", type=int, help="inner steps of the run")
    add("--base", type=int, help="base horizon: steps of the first intervals")
    add("--warmup", type=int, help="steps of learning-rate warm-up (default 0)")
    add("--decay", choices=("cosine", "linear"), help="learning rate after warm-up (default cosine)")
    add("--final-fraction", type=float, help="of the peak, at the end (default 0)")
    add("--policy", help="autoloco (default), staircase, fixed, qsr or linear")
    add("--peak-lr", type=float, help="highest learning rate (default 1; matters with --alpha only)")
    add("--alpha", type=float, help="qsr: its coefficient (default sqrt(base) * peak-lr)")
    add("--increment", type=int, help="linear: growth of the interval (default 10)")
    add("--min", type=int, help="least horizon (default base / 2)")
    add("--max", type=int, help="greatest horizon (default 1.5 * base)")
    add("--step", type=int, help="distance between horizons (default base / 10)")
    add("--growth-cap", type=float, help="a longer interval's learning-rate mass over the last's (default 1.15)")
