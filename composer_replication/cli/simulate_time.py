"""`simulate`: how long a run would take on given machines and links; options read, and answers in words.

Invariant: nothing is trained here; what a run would take is `simulation/timing.py`'s.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from composer_replication.cli.text import duration
from composer_replication.collective.object_store.costs import Link
from composer_replication.recipe import Recipe
from composer_replication.simulation import Machines, timeline

__all__ = ["read_machines", "tell_time"]


def tell_time(recipe: Recipe, run: Mapping[str, Any], machines: Machines) -> None:
    replicas = recipe.fleet.replicas
    intervals = [one["steps"] for one in run["rounds"]]
    rounds = timeline(intervals, machines, replicas=replicas, elements=run["elements"], codec=recipe.codec)
    whole = rounds[-1].ends
    exchange = sum(one.exchange for one in rounds)
    print(f"\non these machines {duration(whole)}, of which {exchange / whole:.1%} exchanging ({len(rounds)} rounds)")
    print(f"{'replica':>8}  {'trains':>12}  {'waits':>12}  {'utilisation':>11}")
    for replica in range(replicas):
        train, wait = sum(one.train[replica] for one in rounds), sum(one.wait[replica] for one in rounds)
        print(f"{replica:>8}  {duration(train):>12}  {duration(wait):>12}  {train / whole:>11.1%}")


def read_machines(args: argparse.Namespace) -> Machines | None:
    if args.step_seconds is None:
        if args.slower:
            raise ValueError("--slower needs --step-seconds: how long does a step take on the others?")
        return None
    slower: dict[int, float] = {}
    for word in args.slower:
        replica, _, factor = word.partition("=")
        try:
            slower[int(replica)] = float(factor)
        except ValueError as error:
            raise ValueError(f"--slower {word}: write it like 3=1.5, replica 3 takes 1.5 times as long") from error
    if not args.latency >= 0:
        raise ValueError(f"--latency must be 0 or more, got {args.latency}")
    rate = args.bandwidth * 1e6 / 8
    return Machines(
        step_seconds=args.step_seconds,
        link=Link(up=rate, down=rate, request_seconds=args.latency / 1000),
        slower=slower,
    )
