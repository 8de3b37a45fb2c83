"""`simulate`: its options and help. What it does is in `simulate.py`.

Invariant: nothing here loads torch; that happens when the command runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

__all__ = ["add_simulate"]

_HELP = """\
examples:
  composer-replication simulate recipes/quickstart.yaml --replicas 8 --seeds 1 2 3
  composer-replication simulate recipes/quickstart.yaml autoloco.policy=fixed -o runs/fixed.jsonl
  composer-replication simulate recipes/quickstart.yaml --step-seconds 0.5 --bandwidth 100 --slower 3=1.5

Trains all replicas in this process, with the loop, the controller and the codecs of a real fleet: final weights are
those of 'launch', to the last bit. Built-in models and data only, on the CPU.

-o keeps one line of JSON a run: settings, every round, losses, digest. Runs that it holds already, of the same recipe,
replicas and seed, aren't trained again, so that an interrupted command goes on where it was.

With --step-seconds it says how long the run would take: a step takes so long on every replica (--slower 3=1.5: half as
long again on replica 3), everyone waits for the last one, and an exchange takes what its bytes and requests take on a
link of --bandwidth each way. utilisation is the share of the time in which a replica trains.

exit code: 0 all runs done, 2 a recipe or option that can't be simulated.
"""


def add_simulate(command: Callable[[str, str, str], argparse.ArgumentParser]) -> None:
    parser = command("simulate", "train a recipe's fleet in one process, fast", _HELP)
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="a YAML file")
    add("overrides", nargs="*", metavar="key=value", help="put over the recipe, e.g. training.steps=200")
    add("--replicas", type=int, metavar="N", help="instead of the recipe's")
    add("--seeds", type=int, nargs="+", metavar="SEED", help="one run each (default: the recipe's)")
    add("-o", "--output", type=Path, metavar="FILE", help="keep the runs here, a line of JSON each")
    add("--json", action="store_true", help="print the runs as JSON, a line each")
    add("--step-seconds", type=float, metavar="S", help="of one inner step: adds how long the run would take")
    add("--bandwidth", type=float, default=1000.0, metavar="MBIT", help="of each link, each way (default 1000)")
    add("--latency", type=float, default=50.0, metavar="MS", help="of a small request to the store (default 50)")
    add("--slower", action="append", default=[], metavar="R=F", help="replica R takes F times as long for a step")
