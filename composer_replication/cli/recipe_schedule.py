"""`schedule RECIPE`: the optimizer, the learning rate and the intervals of a recipe's whole budget, and what they cost.

Invariant: the policy that answers is the one that trains. Neither data nor a device is needed, and of the model only
its size.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from composer_replication.autoloco.schedule import fixed_intervals
from composer_replication.cli.doctor import parse_count
from composer_replication.cli.launch import least_intervals
from composer_replication.cli.round_cost import round_cost
from composer_replication.cli.schedule import interval_lines
from composer_replication.errors import RecipeError
from composer_replication.readable import amount, byte_count, duration
from composer_replication.recipe import Recipe, load_recipe, outer_config, policy_of

__all__ = ["recipe_schedule"]


def recipe_schedule(args: argparse.Namespace) -> int:
    for option, value in (("--bandwidth", args.bandwidth), ("--step-seconds", args.step_seconds)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{option} must be a positive number, not {value}")
    recipe = load_recipe(args.recipe, args.overrides)
    elements = parse_count("--parameters", args.parameters) if args.parameters is not None else None
    values = _values(recipe, elements, args.bandwidth, args.step_seconds)
    if args.json:
        print(json.dumps(values))
    else:
        print("\n".join(_lines(recipe, values)), flush=True)
    return 0


def _values(recipe: Recipe, elements: int | None, bandwidth: float, step_seconds: float | None) -> dict[str, Any]:
    intervals = least_intervals(recipe)
    if intervals is None:
        raise RecipeError(
            f"model.class: {recipe.model.class_} may have a schedule of its own: give --steps, --base and --warmup"
        )
    cost, rounds = round_cost(recipe, elements, bandwidth), len(intervals)
    total = None
    if cost is not None:
        total = {name: cost[name] * rounds for name in ("up_bytes", "down_bytes", "seconds")}
    training = None if step_seconds is None else step_seconds * recipe.training.steps
    return {
        "name": recipe.name,
        "policy": recipe.autoloco.policy,
        "replicas": recipe.fleet.replicas,
        "steps": recipe.training.steps,
        "rounds": rounds,
        "fixed": fixed_intervals(recipe.training.steps, recipe.autoloco.base_horizon),
        "horizons": list(intervals),
        "optimizer": asdict(recipe.optimizer),
        "scheduler": asdict(recipe.scheduler),
        "outer": asdict(outer_config(recipe)),
        "round": cost,
        "total": total,
        "training_seconds": training,
    }


def _lines(recipe: Recipe, values: Mapping[str, Any]) -> Iterator[str]:
    yield f"{values['name']}: {values['replicas']} replicas, {values['steps']} steps each, policy {values['policy']}"
    optimizer, scheduler, outer = values["optimizer"], values["scheduler"], values["outer"]
    more = "".join(f", {name} {value}" for name, value in optimizer["args"].items())
    yield f"inner step    {optimizer['name']}, lr {optimizer['lr']:g}, weight decay {optimizer['weight_decay']:g}{more}"
    ends = f", then to {scheduler['final_fraction']:g} of the peak at step {values['steps']}"
    ends = ", then constant" if scheduler["name"] == "constant" else ends
    yield f"its lr        {scheduler['name']}: {scheduler['warmup_steps']} steps of warm-up{ends}"
    yield f"outer step    {_outer(outer, values['policy'])}"
    if values["policy"] in ("autoloco", "staircase"):
        config = policy_of(recipe).settings()
        yield (
            f"horizons      {config['base_horizon']}, later {config['min_horizon']} to {config['max_horizon']} in "
            f"steps of {config['horizon_step']}; {config['warmup_steps']} steps of warm-up"
        )
    yield ""
    share = 100 * values["rounds"] / values["fixed"]
    fixed = f"; a fixed interval of {recipe.autoloco.base_horizon} takes {values['fixed']} ({share:.0f} %)"
    least = " if every interval goes well" if values["policy"] == "autoloco" else ""
    yield f"{values['rounds']} rounds{least}{'' if values['policy'] == 'fixed' else fixed}"
    yield from interval_lines(values["horizons"])
    yield ""
    yield from _costs(values)


def _outer(outer: Mapping[str, Any], policy: str) -> str:
    if outer["kind"] == "average":
        return "the mean of the replicas' weights"
    text = f"{outer['kind']}, lr {outer['lr']:g}, momentum {outer['momentum']:g}"
    if policy not in ("autoloco", "staircase"):
        return text
    scale = "without bound" if outer["max_scale"] is None else f"at most {outer['max_scale']:g} times"
    adapted = [
        f"momentum in [{outer['momentum_min']:g}, {outer['momentum_max']:g}]" if outer["adapt_momentum"] else "",
        f"lr {scale}" if outer["adapt_lr"] else "",
        "pseudo-gradients divided by rho" if outer["normalize"] else "",
    ]
    found = ", ".join(one for one in adapted if one)
    return f"{text}; adapted to the interval: {found or 'nothing'}"


def _costs(values: Mapping[str, Any]) -> Iterator[str]:
    cost, total = values["round"], values["total"]
    if cost is None or total is None:
        yield "a round       not known: say how large the model is, --parameters 1.3B"
        return
    yield (
        f"a round       {byte_count(cost['up_bytes'])} up and {byte_count(cost['down_bytes'])} down for each replica "
        f"({amount(cost['parameters'])} parameters, {cost['codec']}), about {duration(cost['seconds'])} at "
        f"{cost['bandwidth_mbit']:g} Mbit/s (--bandwidth)"
    )
    text = f"in all        {byte_count(total['up_bytes'])} up and {byte_count(total['down_bytes'])} down"
    yield f"{text}, {duration(total['seconds'])} of exchanging"
    if values["training_seconds"] is None:
        yield "training      give --step-seconds, what an optimizer step takes on one replica"
        return
    whole = total["seconds"] + values["training_seconds"]
    yield f"with training {duration(whole)}, {100 * total['seconds'] / whole:.1f} % of that exchanging"
