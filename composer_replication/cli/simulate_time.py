"""`simulate`: how long a run would take on given machines and links, in words and as JSON.

Invariant: nothing is trained here; what a run would take is `simulation/timing.py`'s and `lockstep.py`'s.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from composer_replication.cli.doctor import parse_count
from composer_replication.cli.launch import least_intervals
from composer_replication.cli.simulate_machines import read_machines
from composer_replication.diloco.serverless.components import parameter_count
from composer_replication.errors import RecipeError
from composer_replication.readable import amount, byte_count, duration
from composer_replication.recipe import Recipe
from composer_replication.simulation.lockstep import lockstep
from composer_replication.simulation.machines import Machines
from composer_replication.simulation.timing import Rules, Timeline, timeline

__all__ = ["ABORTED", "check_machines", "tell_time", "time_only", "time_values"]

ABORTED = 1  # exit code: on these machines the run ends before its last round

_PARTS = ("train", "lost", "exchange", "wait", "down")
_TWO_BYTES = ("bf16-true", "16-true", "transformer-engine", "transformer-engine-float16")


def check_machines(recipe: Recipe, machines: Machines) -> None:
    """Raises ValueError for what this recipe's fleet can't have, before anything is trained."""
    timeline((), machines, replicas=recipe.fleet.replicas, elements=1, codec=recipe.codec, rules=Rules.of(recipe))


def time_only(recipe: Recipe, args: argparse.Namespace) -> int:
    """The times of a run that isn't trained: every interval goes well, so that the rounds are the fewest possible."""
    machines = read_machines(args)
    if machines is None:
        raise ValueError("--time-only needs --step-seconds: how long does an inner step take?")
    if args.seeds or args.output:
        raise ValueError("--time-only trains nothing, so that there is nothing for --seeds and -o")
    check_machines(recipe, machines)
    intervals = least_intervals(recipe, assumed=True)
    assert intervals is not None
    elements = _elements(recipe, args.parameters)
    values = time_values(recipe, intervals, elements, machines)
    if args.json:
        print(json.dumps({"name": recipe.name, "parameters": elements, "intervals": list(intervals), "time": values}))
        return ABORTED if values["aborted"] else 0
    print(
        f"{recipe.name}: {recipe.fleet.replicas} replicas, {recipe.training.steps} steps each, {amount(elements)} "
        f"parameters, policy {recipe.autoloco.policy}, {recipe.codec}; "
        f"{len(intervals)} rounds if every interval goes well"
    )
    if recipe.model.name is None:
        section = recipe.scheduler
        print(
            f"taken for the learning rate: the recipe's scheduler, {section.name} after {section.warmup_steps} steps "
            "of warm-up (your own may give other intervals)"
        )
    for line in _lines(values):
        print(line)
    return ABORTED if values["aborted"] else 0


def _elements(recipe: Recipe, parameters: str | None) -> int:
    if parameters is not None:
        return parse_count("--parameters", parameters)
    count = parameter_count(recipe)
    if count is None:
        raise RecipeError("how large is your model? Say it with --parameters 1.3B: --time-only doesn't build it")
    return count


def time_values(recipe: Recipe, intervals: Sequence[int], elements: int, machines: Machines) -> dict[str, Any]:
    """What a run with these intervals takes, the same with a fixed one, and with gradients averaged in every step."""
    replicas, codec, base = recipe.fleet.replicas, recipe.codec, recipe.autoloco.base_horizon
    steps = sum(intervals)
    fixed = [min(base, steps - done) for done in range(0, steps, base)]

    def timed(these: Sequence[int]) -> Timeline:
        return timeline(these, machines, replicas=replicas, elements=elements, codec=codec, rules=Rules.of(recipe))

    run = timed(intervals)
    size = 2 if recipe.training.precision in _TWO_BYTES else 4
    every_step = lockstep(
        steps,
        machines,
        replicas=replicas,
        elements=elements,
        bytes_per_element=size,
        checkpoint_seconds=base * machines.step_seconds,
    )
    return {
        "seconds": run.seconds,
        "rounds": len(run.rounds),
        "aborted": run.aborted,
        "remedy": run.remedy,
        "short_rounds": run.short_rounds,
        "intervals_lost": sum(run.lost),
        "replicas": [
            {
                **{f"{name}_seconds": value for name, value in asdict(parts).items()},
                "utilisation": run.utilisation[replica],
                "rounds_absent": run.absences(replica),
                "intervals_lost": run.lost[replica],
            }
            for replica, parts in enumerate(run.totals)
        ],
        "fixed": None if list(intervals) == fixed else _short(timed(fixed), base),
        "every_step": {
            **{name: _finite(value) for name, value in asdict(every_step).items()},
            "bytes_a_step": 2 * (replicas - 1) / replicas * elements * size,
        },
    }


def _short(run: Timeline, base: int) -> dict[str, Any]:
    return {"interval": base, "seconds": run.seconds, "rounds": len(run.rounds), "aborted": run.aborted}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def tell_time(values: Mapping[str, Any]) -> None:
    print()
    for line in _lines(values):
        print(line)


def _lines(values: Mapping[str, Any]) -> Iterator[str]:
    whole, replicas = values["seconds"], values["replicas"]
    share = sum(one["exchange_seconds"] for one in replicas) / len(replicas) / whole if whole else 0.0
    yield f"on these machines {duration(whole)}, of which {share:.1%} exchanging ({values['rounds']} rounds)"
    if values["aborted"]:
        yield f"and then the run ends: {values['aborted']}."
        if values["remedy"]:
            yield f"What would help: {values['remedy']}."
    heads = "".join(f"  {head:>12}" for head in ("trains", "in vain", "exchanges", "waits", "gone"))
    yield f"{'replica':>8}{heads}  {'utilisation':>11}  absent"
    for replica, one in enumerate(replicas):
        times = "".join(f"  {duration(one[f'{part}_seconds']):>12}" for part in _PARTS)
        yield f"{replica:>8}{times}  {one['utilisation']:>11.1%}  {one['rounds_absent']:>6}"
    if values["intervals_lost"] or values["short_rounds"]:
        yield (
            f"intervals trained in vain: {values['intervals_lost']}; "
            f"rounds in which somebody was absent: {values['short_rounds']}"
        )
    if values["fixed"] and not values["aborted"]:
        yield _fixed_line(values["fixed"], whole)
    yield _every_step_line(values["every_step"], whole, values["aborted"])


def _fixed_line(fixed: Mapping[str, Any], whole: float) -> str:
    text = f"with a fixed interval of {fixed['interval']}: {duration(fixed['seconds'])} ({fixed['rounds']} rounds)"
    if fixed["aborted"]:
        return f"{text}, and then the run ends: {fixed['aborted']}"
    saved = fixed["seconds"] - whole
    return f"{text}: {duration(abs(saved))} {'more' if saved >= 0 else 'less'} ({abs(saved) / fixed['seconds']:.1%})"


def _every_step_line(one: Mapping[str, Any], whole: float, aborted: str) -> str:
    what = (
        f"{byte_count(one['bytes_a_step'])} a step in {duration(one['all_reduce_seconds'])}, computing takes "
        f"{duration(one['compute_seconds'])}"
    )
    if one["seconds"] is None:
        return f"with gradients averaged in every step (DDP) it never ends on these machines; {what}"
    times = "" if aborted or not whole else f", {one['seconds'] / whole:.3g} times as long"
    return f"with gradients averaged in every step (DDP): at least {duration(one['seconds'])}{times}; {what}"
