"""`launch --resume`: is what is about to be started the run that lies in the store?

Invariant: reads only, and before anything is started or written, so that the wrong recipe costs a sentence and the
run's folder stays as it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from composer_replication.cli.view import RunReader
from composer_replication.collective.agreement import differing_settings
from composer_replication.collective.object_store.epochs import current, read_fleet
from composer_replication.collective.object_store.fleet import few
from composer_replication.collective.object_store.settings import make_policy
from composer_replication.diloco.serverless.replica import FINAL
from composer_replication.errors import RecipeError
from composer_replication.recipe import Recipe, load_recipe, policy_of
from composer_replication.recipe.settings import guards_of, outer_config
from composer_replication.store import ObjectStore

__all__ = ["check_same_run"]

_OUTER = {"lr": "outer_lr", "momentum": "outer_momentum"}


def check_same_run(recipe: Recipe, store: ObjectStore, own_recipe: Path, *, new_epoch: bool) -> str:
    """Raise RecipeError if the recipe isn't of the run in `store`; says in a sentence that the run has ended, if it has
    and nobody has anything left to do, and else nothing. `own_recipe` is the file that the run was started with.

    Training settings stay those of the run; codec, membership and guards may change with a new epoch only.
    """
    launch_it = f"launch the run's own recipe: composer-replication launch {own_recipe} --resume"
    fleet, present = read_fleet(current(store))
    if fleet is None:  # stopped before it had begun
        return ""
    steps, own = recipe.training.steps, _own(own_recipe)
    reader = RunReader(store)
    reader.refresh()
    done = reader.rounds[-1].position if reader.rounds else 0
    text = f"the run has ended ({len(reader.rounds)} rounds, {done} steps)" if reader.ended else ""
    if reader.ended:
        if recipe.fleet.replicas != reader.replicas:
            text += f" with {reader.replicas} replicas, fleet.replicas={recipe.fleet.replicas} can't change that"
            raise RecipeError(f"{text}: begin another run (leave --resume out, or give another output=...)")
        if steps > (own.training.steps if own is not None else done):
            text += f" and can't be trained on to training.steps={steps}"
            raise RecipeError(f"{text}: begin another run (leave --resume out, or give another output=...)")
    if steps < done:
        raise RecipeError(f"training.steps={steps}: the run has done {done} steps already; to go on, {launch_it}")
    mine, theirs = _facts(recipe), {"settings": {}, **fleet}
    if new_epoch or not present:
        mine, theirs = {"settings": mine["settings"]}, {"settings": theirs["settings"]}
    lines = [_in_recipe(line) for line in differing_settings(*_comparable(theirs, mine))]
    if own is not None and own.model != recipe.model:
        lines.insert(0, "model: not the one that the run was started with")
    if lines:
        raise RecipeError(f"this isn't how the run in {store.uri} was started: {few(lines, 5)}. To go on, {launch_it}")
    return f"{text}: there is nothing to resume" if text and _all_have_finished(recipe, own_recipe) else ""


def _own(file: Path) -> Recipe | None:
    """The recipe that the run was started with; None where it can't be read, or isn't there (another machine)."""
    try:
        return load_recipe(file) if file.is_file() else None
    except RecipeError:
        return None


def _all_have_finished(recipe: Recipe, own_recipe: Path) -> bool:
    """A replica that was stopped after the last round hasn't validated, nor written its weights."""
    folders = [own_recipe.parent / f"replica-{replica}" for replica in range(recipe.fleet.replicas)]
    return all((folder / FINAL).exists() or not folder.exists() for folder in folders)


def _facts(recipe: Recipe) -> dict[str, Any]:
    """What the recipe's replicas will say of themselves in fleet.json, as far as a recipe decides it."""
    guards = guards_of(recipe)
    policy = make_policy(
        replica=0,
        replicas=recipe.fleet.replicas,
        failure_policy=recipe.fleet.failure_policy,
        min_replicas=recipe.fleet.min_replicas,
        tolerated_misses=1,
        mode="auto",
        guards=guards,
    )
    facts = {
        "codec": recipe.codec,
        "failure_policy": recipe.fleet.failure_policy,
        "min_replicas": policy.min_replicas,
        "checkpoint_every": recipe.fleet.shared_checkpoint_every_rounds,
        "guards": guards.to_json(),
        "settings": {
            "policy": policy_of(recipe).settings(),
            "outer": asdict(outer_config(recipe)),
            "buffers": recipe.autoloco.buffers,
            "weighting": recipe.autoloco.weighting,
        },
    }
    return json.loads(json.dumps(facts))


def _comparable(theirs: Mapping[str, Any], mine: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of both what a recipe decides; of two policies only their names, as they have other settings."""
    known = {name: value for name, value in theirs.items() if name in mine}
    settings = {name: value for name, value in known["settings"].items() if name in mine["settings"]}
    own = mine["settings"]
    names = [one.get("policy", {}).get("policy") for one in (settings, own)]
    if names[0] != names[1]:
        settings, own = ({**one, "policy": {"policy": name}} for one, name in zip((settings, own), names, strict=True))
    return {**known, "settings": settings}, {**mine, "settings": own}


def _in_recipe(line: str) -> str:
    """A difference, under the recipe's name for it."""
    name, colon, rest = line.partition(":")
    section, _, field = name.rpartition(".")
    if name in ("failure_policy", "min_replicas") or section == "guards":
        name = f"fleet.{field}"
    elif name == "checkpoint_every":
        name = "fleet.shared_checkpoint_every_rounds"
    elif section == "settings.outer":
        name = f"autoloco.{_OUTER.get(field, field)}"
    elif section == "settings.policy" and field == "peak_lr":
        name = "optimizer.lr"
    elif section.startswith("settings"):
        name = f"autoloco.{field}"
    return f"{name}{colon}{rest}"
