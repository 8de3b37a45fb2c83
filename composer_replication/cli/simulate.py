"""`simulate`: a recipe's fleet in one process, over several seeds, and how long it would take on given machines.

Invariant: a run that has been written down isn't trained again; one that was cut short leaves nothing behind.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from composer_replication.autoloco.schedule import fixed_intervals
from composer_replication.cli.simulate_machines import read_machines
from composer_replication.cli.simulate_time import ABORTED, check_machines, tell_time, time_only, time_values
from composer_replication.diloco.round_record import RECORD_VERSION, record_of
from composer_replication.diloco.summary import RoundSummary
from composer_replication.errors import RecipeError
from composer_replication.readable import byte_count, duration
from composer_replication.recipe import Recipe, load_recipe, to_yaml
from composer_replication.simulation import record_of_simulation, simulate
from composer_replication.simulation.machines import Machines

__all__ = ["simulate_command"]


def simulate_command(args: argparse.Namespace) -> int:
    recipe = load_recipe(args.recipe, args.overrides)
    if args.replicas is not None:
        if args.replicas < 1:
            raise ValueError(f"--replicas must be at least 1, got {args.replicas}")
        recipe = replace(recipe, fleet=replace(recipe.fleet, replicas=args.replicas))
    if args.time_only:
        return time_only(recipe, args)
    if args.parameters is not None:
        raise ValueError("--parameters is for --time-only: a model that is trained is known")
    machines, timed = read_machines(args), recipe
    if machines is not None:
        check_machines(recipe, machines)
        # Replicas fail in the times only: what is trained is the fleet that nobody is missing from.
        recipe = replace(recipe, fleet=replace(recipe.fleet, failure_policy="strict", min_replicas=None))
    kept = _read(args.output) if args.output else {}
    runs: list[dict[str, Any]] = []
    seeds = args.seeds or [recipe.training.seed]
    for seed in seeds:
        settings = _settings(recipe, seed)
        found = kept.get(_key(settings))
        if found is None:
            found = _run(recipe, seed, settings, quiet=args.json)
            if args.output:
                _append(args.output, found)
        elif not args.json:
            print(f"seed {seed}: in {args.output} already")
        runs.append(found)
    times = [_times(timed, run, machines) for run in runs]
    code = ABORTED if any(one["aborted"] for one in times if one is not None) else 0
    if args.json:
        for run, time_of in zip(runs, times, strict=True):
            print(json.dumps(run if time_of is None else {**run, "time": time_of}))
        return code
    _tell(recipe, runs)
    if times[0] is not None:
        tell_time(times[0])
    for seed, one in zip(seeds[1:], times[1:], strict=True):  # the table is the first one's
        if one is not None and one["aborted"]:
            print(f"seed {seed}: {one['aborted']}")
    return code


def _times(recipe: Recipe, run: Mapping[str, Any], machines: Machines | None) -> dict[str, Any] | None:
    if machines is None or not run["rounds"]:
        return None
    return time_values(recipe, [one["steps"] for one in run["rounds"]], run["elements"], machines)


# -- one run ---------------------------------------------------------------------------------------------------------


def _run(recipe: Recipe, seed: int, settings: Mapping[str, Any], *, quiet: bool) -> dict[str, Any]:
    began = time.monotonic()
    steps = recipe.training.steps

    def told(closed: RoundSummary) -> None:
        if quiet:
            return
        spent = time.monotonic() - began
        left = spent * (steps - closed.position) / max(1, closed.position)
        loss = _number(record_of(closed).loss)
        words = f"seed {seed}: round {closed.round}, step {closed.position} of {steps}, loss {loss:.3f}"
        over = closed.position >= steps
        words += f", {duration(spent)}" if over else f", about {duration(left)} left"
        if sys.stdout.isatty():  # one line that changes
            print(f"\r{words:<78}", end="\n" if over else "", flush=True)
        else:
            print(words, flush=True)

    run = simulate(recipe, seed=seed, told=told)
    return {**settings, **record_of_simulation(recipe, run, name=recipe.name, seconds=time.monotonic() - began)}


def _settings(recipe: Recipe, seed: int) -> dict[str, Any]:
    """What tells one run from another: the recipe without what doesn't touch the numbers."""
    plain = replace(recipe, training=replace(recipe.training, seed=seed), output=None, name="run")
    digest = hashlib.sha256(to_yaml(plain).encode()).hexdigest()[:16]
    return {"version": RECORD_VERSION, "recipe": digest, "replicas": recipe.fleet.replicas, "seed": seed}


def _key(values: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(values.get(name) for name in ("version", "recipe", "replicas", "seed"))


# -- what is kept ----------------------------------------------------------------------------------------------------


def _read(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return {}
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            values = json.loads(line)
        except ValueError as error:
            raise RecipeError(f"{path}, line {number}, isn't JSON: give another file with -o") from error
        if not isinstance(values, dict) or values.get("version") != RECORD_VERSION:
            raise RecipeError(f"{path}, line {number}, isn't a run of this version: give another file with -o")
        found[_key(values)] = values
    return found


def _append(path: Path, run: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(run) + "\n")


# -- in words --------------------------------------------------------------------------------------------------------


def _tell(recipe: Recipe, runs: Sequence[Mapping[str, Any]]) -> None:
    fixed = fixed_intervals(recipe.training.steps, recipe.autoloco.base_horizon)
    print(f"\n{recipe.fleet.replicas} replicas, {recipe.training.steps} steps each, policy {recipe.autoloco.policy}")
    print(f"{'seed':>6}  {'rounds':>6}  {'of fixed':>8}  {'loss':>7}  {'validation':>10}  {'sent each':>10}  digest")
    for run in runs:
        rounds, result = len(run["rounds"]), run["result"]
        print(
            f"{run['seed']:>6}  {rounds:>6}  {rounds / fixed:>8.0%}  {_number(run['rounds'][-1]['loss']):>7.4f}"
            f"  {_number(result['validation_loss']):>10.4f}  {byte_count(result['bytes_sent']):>10}"
            f"  {result['digest'][:12]}"
        )
    if len(runs) > 1:
        losses = [_number(run["result"]["validation_loss"]) for run in runs]
        print(f"validation loss {mean(losses):.4f} ± {stdev(losses):.4f} over {len(runs)} seeds")


def _number(value: float | None) -> float:
    return math.nan if value is None else value
