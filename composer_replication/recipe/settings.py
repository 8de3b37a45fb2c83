"""From a recipe's values to the settings of the core, whose own checks then speak about the recipe's keys.

Invariant: what these functions return passes; every ValueError of the core leaves as a RecipeError that names the key.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any, TypeVar

from composer_replication.autoloco.config import AutoLoCoConfig, OuterConfig
from composer_replication.autoloco.policies import make_policy
from composer_replication.autoloco.values import Policy
from composer_replication.collective.guards import Guards
from composer_replication.errors import RecipeError
from composer_replication.recipe.schema import Recipe

__all__ = ["controller_config", "guards_of", "outer_config", "policy_of", "task_of"]

_T = TypeVar("_T")

# OuterConfig's fields that the recipe calls otherwise.
_OUTER_KEYS = {"lr": "outer_lr", "momentum": "outer_momentum"}


def _asking(make: Callable[[], _T], names: dict[str, str]) -> _T:
    try:
        return make()
    except ValueError as error:
        # The core's messages begin with the field's name.
        first, _, rest = str(error).partition(" ")
        named = names.get(first)
        raise RecipeError(f"autoloco.{named}: {named} {rest}" if named else f"autoloco: {error}") from error


def controller_config(recipe: Recipe) -> AutoLoCoConfig:
    """The controller's settings. Raises RecipeError."""
    section = recipe.autoloco
    values = {f.name: getattr(section, f.name) for f in fields(AutoLoCoConfig)}
    if values["warmup_steps"] is None:
        values["warmup_steps"] = recipe.scheduler.warmup_steps
    return _asking(lambda: AutoLoCoConfig(**values), {name: name for name in values})


def outer_config(recipe: Recipe) -> OuterConfig:
    """The outer step's settings, as resolved for the recipe's policy. Raises RecipeError."""
    section = recipe.autoloco
    names = {f.name: _OUTER_KEYS.get(f.name, f.name) for f in fields(OuterConfig) if f.name != "kind"}
    values = {name: getattr(section, key) for name, key in names.items()}
    return _asking(lambda: OuterConfig(**values).resolved(section.policy), names)


def guards_of(recipe: Recipe) -> Guards:
    """How the recipe's fleet treats contributions. Raises ValueError that begins with the key."""
    return Guards(**{f.name: getattr(recipe.fleet, f.name) for f in fields(Guards)})


def task_of(recipe: Recipe) -> dict[str, Any]:
    """What is trained, with whatever policy: plain JSON values."""
    found = {name: asdict(getattr(recipe, name)) for name in ("model", "data", "optimizer", "scheduler")}
    for section in (found["model"], found["data"]):
        own = section.pop("class_")
        section["name"] = section["name"] or own
    training = recipe.training
    found |= {"gradient_clip": training.gradient_clip, "accumulate": training.accumulate}
    return json.loads(json.dumps(found, default=str))


def policy_of(recipe: Recipe) -> Policy:
    """The policy that the recipe names. Raises RecipeError."""
    section, config = recipe.autoloco, controller_config(recipe)
    options: dict[str, object] = {}
    if section.policy == "linear":
        options["increment"] = section.increment
    elif section.policy == "qsr":
        options.update(alpha=section.alpha, peak_lr=None if section.alpha else recipe.optimizer.lr)
    names = {name: name for name in ("alpha", "increment")} | {"peak_lr": "alpha"}
    try:
        return _asking(lambda: make_policy(section.policy, config, **options), names)
    except RecipeError as error:
        if "there is no policy" in str(error):
            raise RecipeError(str(error).replace("autoloco:", "autoloco.policy:", 1)) from error
        raise
