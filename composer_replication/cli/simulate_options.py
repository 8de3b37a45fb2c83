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
  composer-replication simulate my.yaml --time-only --parameters 1.3B --step-seconds 2 --failures-per-hour 0.1

Trains all replicas in this process, with the loop, the controller and the codecs of a real fleet: final weights are
those of 'launch', to the last bit. Built-in models and data only, on the CPU.

-o keeps one line of JSON a run: settings, every round, losses, digest. Runs that it holds already, of the same recipe,
replicas and seed, aren't trained again, so that an interrupted command goes on where it was.

With --step-seconds it says how long the run would take on such machines, where each replica's time goes, and what a
fixed interval, or averaging gradients in every step (DDP), would take there. An exchange takes what its bytes and
requests take on the links. The recipe's fleet.failure_policy decides who waits: strict waits for everyone, skip goes on
without who is late or gone, after the wait that it has learned (docs/simulate.md).
  --slower 3=1.5 --link 3=25      a step takes replica 3 1.5 times as long; its link carries 25 Mbit/s
  --fail 2@10m+90 --fail 0@3h+inf replica 2 is killed after 10 minutes and back 90 s later; replica 0 never comes back
  --fail 2@600                    in seconds, or with m or h; without '+' it is back after --restart-seconds
  --failures-per-hour 0.1         each machine is killed about every 10 hours; --preemptions-per-hour: with a warning
--time-only trains nothing: the intervals are those of a run in which all goes well. It takes any model whose size you
say (--parameters), and a second.

exit code: 0 all runs done, 1 done, but on these machines a run ends before its last round (the output says why), 2 a
recipe or option that can't be simulated.
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
    times = parser.add_argument_group("how long it would take").add_argument
    times("--time-only", action="store_true", help="train nothing, only work out times")
    times("--parameters", metavar="N", help="size of the model, for --time-only: 1.3B")
    times("--step-seconds", type=float, metavar="S", help="of one inner step")
    times("--slower", action="append", default=[], metavar="R=F", help="replica R takes F times as long for a step")
    times("--jitter", type=float, default=0.0, metavar="PART", help="steps vary by that part (0.1: 10 %%)")
    times("--bandwidth", type=float, default=1000.0, metavar="MBIT", help="of each link, each way (default 1000)")
    times("--link", action="append", default=[], metavar="R=MBIT", help="replica R's link carries that instead")
    times("--latency", type=float, default=50.0, metavar="MS", help="of a small request to the store (default 50)")
    times("--peer-latency", type=float, default=1.0, metavar="MS", help="between replicas, for DDP (default 1)")
    times(
        "--fail",
        action="append",
        default=[],
        metavar="R@T[+S]",
        help="replica R is killed T after the start and trains again S later: seconds, or like 10m, 2h; S may be inf "
        "(default: --restart-seconds)",
    )
    times("--preempt", action="append", default=[], metavar="R@T[+S]", help="the same with a warning: nothing is lost")
    times(
        "--link-down",
        action="append",
        default=[],
        metavar="R@T+S",
        help="R's link carries nothing from T on, for S",
    )
    times("--failures-per-hour", type=float, default=0.0, metavar="F", help="of each machine, killed at random")
    times("--preemptions-per-hour", type=float, default=0.0, metavar="F", help="the same with a warning")
    times("--restart-seconds", type=float, default=60.0, metavar="S", help="until one that failed trains (default 60)")
    times("--startup-seconds", type=float, default=0.0, metavar="S", help="before the first step (default 0)")
    times("--time-seed", type=int, default=0, metavar="SEED", help="of jitter and random failures (default 0)")
