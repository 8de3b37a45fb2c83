"""`plan`: what a launch would come to, before anything is started.

Invariant: starts nothing and writes nothing; services are asked only what `launch` asks before its first job. What
isn't known is said to be so.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from composer_replication.autoloco.schedule import fixed_intervals
from composer_replication.cli.doctor import parse_count
from composer_replication.cli.launch import checked_recipe, intention, least_rounds, written_specs
from composer_replication.cli.plan_access import access_of, credentials_of
from composer_replication.cli.plan_text import plan_lines
from composer_replication.cli.prices import Price, Prices, break_even
from composer_replication.cli.round_cost import round_cost
from composer_replication.collective.object_store.wire import for_people
from composer_replication.diloco.serverless.groups import (
    Group,
    groups_of,
    make_executor,
    option_defaults,
    places_to_warn_of,
)
from composer_replication.diloco.serverless.jobs.shipping import pack_code
from composer_replication.diloco.serverless.spec import ReplicaSpec, entrypoint_command
from composer_replication.errors import ExecutorError
from composer_replication.recipe import Recipe

__all__ = ["plan"]


def plan(
    path: str,
    overrides: Sequence[str],
    *,
    prices: str | None,
    policy: bool,
    bandwidth: float,
    parameters: str | None,
    step_seconds: float | None,
    node: str | None,
    as_json: bool,
) -> int:
    for option, value in (("--bandwidth", bandwidth), ("--step-seconds", step_seconds)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{option} must be a positive number, not {value}")
    table = Prices(prices)
    elements = parse_count("--parameters", parameters) if parameters is not None else None
    recipe = checked_recipe(path, overrides)
    groups = groups_of(recipe)
    code = pack_code(recipe.executor.code) if recipe.executor.code else None
    with tempfile.TemporaryDirectory() as folder:
        specs = written_specs(recipe, Path(folder))
        shown = [_group(group, recipe, specs, code, table) for group in groups]
    values: dict[str, Any] = {
        "name": recipe.name,
        "intention": intention(recipe),
        "store": recipe.store.uri,
        "groups": shown,
        "round": round_cost(recipe, elements, bandwidth),
        "rounds": {
            "least": least_rounds(recipe),
            "fixed": fixed_intervals(recipe.training.steps, recipe.autoloco.base_horizon),
        },
        "warnings": [*places_to_warn_of(recipe), *_warnings(recipe, groups)],
    }
    values |= _costs(recipe, groups, table, values, step_seconds, node)
    if policy:
        values["access"] = [access_of(group, recipe) for group in groups]
    print(for_people(values).decode("ascii") if as_json else "\n".join(plan_lines(values)), flush=True)
    return 2 if any(one["refused"] for one in shown) else 0


def _group(group: Group, recipe: Recipe, specs: list[ReplicaSpec], code: bytes | None, table: Prices) -> dict[str, Any]:
    mine = [spec for spec in specs if spec.replica_id in group.replicas]
    options = {**option_defaults(group.backend), **group.options}
    price = table.of(group.backend, options)
    values: dict[str, Any] = {
        "back_end": group.backend,
        "replicas": list(group.replicas),
        "options": dict(group.options),
        "refused": "",
        "price": None if price is None else asdict(price),
        "credentials": credentials_of(group, recipe),
    }
    if not group.remote:
        own = replace(mine[0], recipe=mine[0].recipe and "RUN/recipe.yaml")
        return values | {"limits": _budgets(group, recipe), "command": entrypoint_command(own, "python"), "jobs": []}
    executor = make_executor(group, recipe, code=code)
    values["limits"] = {
        "image": executor.image,
        "hours_of_a_job": executor.time_limit_seconds / 3600,
        "longest_hours": executor.longest_seconds / 3600,
        "submissions_at_once": executor.max_concurrent_launches,
        "name_characters": executor.name_limit,
        "restarts": executor.budgets.restarts,
        "error_restarts": executor.budgets.error_restarts,
        "logs": "in the store" if executor.ship_logs else "the service's",
        "code_bytes": None if code is None else len(code),
        "requirements": list(executor.requirements),
    }
    try:
        jobs = [executor.job(spec) for spec in mine]
        values |= {"jobs": [job.name for job in jobs], "command": list(jobs[0].command)}
        values["variables"] = sorted(jobs[0].env)
        values["handed_over"] = sorted(jobs[0].secrets)
        executor.check_specs(mine)
    except (ValueError, ExecutorError, OSError) as error:
        values["refused"] = str(error)
    return {"jobs": [], "command": [], **values}


def _budgets(group: Group, recipe: Recipe) -> dict[str, Any]:
    both = {"restarts": recipe.executor.restarts, "error_restarts": recipe.executor.error_restarts}
    return {name: group.options.get(name, value) for name, value in both.items()}


def _warnings(recipe: Recipe, groups: Sequence[Group]) -> list[str]:
    found: list[str] = []
    args = {**recipe.model.args, **recipe.data.args}
    for name, value in args.items():
        if any(group.remote for group in groups) and isinstance(value, str) and os.path.isabs(value):
            found.append(f"{name}: {value} is a path, which replicas elsewhere must have, too")
    return found


def _costs(
    recipe: Recipe,
    groups: Sequence[Group],
    table: Prices,
    values: dict[str, Any],
    step_seconds: float | None,
    node: str | None,
) -> dict[str, Any]:
    prices: list[Price] = []
    unknown: list[str] = []
    for group in groups:
        price = table.of(group.backend, {**option_defaults(group.backend), **group.options})
        if price is None:
            unknown.append(group.backend)
        else:
            prices += [price] * len(group.replicas)
    seconds = values["round"]["seconds"] if values["round"] else None
    rounds = values["rounds"]["least"] or values["rounds"]["fixed"]
    hours = None
    if step_seconds is not None:
        hours = (recipe.training.steps * step_seconds + rounds * (seconds or 0.0)) / 3600
    per_hour = sum(price.usd_per_hour for price in prices)
    costs: dict[str, Any] = {
        "dated": table.dated,
        "unknown": sorted(set(unknown)),
        "usd_per_hour": per_hour if prices else None,
        "hours": hours,
        "usd": per_hour * hours if hours is not None and prices else None,
        "approximate": any(price.approximate for price in prices),
    }
    found = None
    if prices and not unknown:
        gpus = sum(price.gpus for price in prices)
        same = len({price.gpu for price in prices}) == 1
        nodes = table.node(node) if node is not None else table.nodes(prices[0].gpu, gpus) if same else {}
        found = break_even(prices, nodes, round_seconds=seconds, horizon=recipe.autoloco.base_horizon)
    return {"costs": costs, "break_even": None if found is None else {**asdict(found), "share": found.share}}
