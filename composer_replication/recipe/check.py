"""Values that a type doesn't rule out, looked at before anything is started.

Invariant: a recipe that passes gives settings that the core accepts; each refusal names one key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from composer_replication.collective.retention import check_own_checkpoints
from composer_replication.errors import RecipeError
from composer_replication.recipe.backends import BACKENDS
from composer_replication.recipe.messages import Place, nearest
from composer_replication.recipe.schema import Recipe
from composer_replication.recipe.settings import guards_of, outer_config, policy_of
from composer_replication.store.signing_key import find_signing_key

__all__ = ["LOGGERS", "check"]

LOGGERS = ("csv", "tensorboard", "wandb", "mlflow")
_TRAINERS_LOGGERS = ("logger", "loggers")  # Lightning's and Composer's own argument for them


def check(recipe: Recipe, place: Place) -> None:
    """Raise RecipeError for the values that can't work: for all of them, as far as each is wrong by itself."""
    problems: list[str] = []

    def refuse(key: str, wanted: str, remedy: str = "") -> None:
        value: Any = recipe
        for part in key.split("."):
            value = getattr(value, part)
        problems.append(f"{place.of(key)} must be {wanted}, not {value!r}{remedy}")

    def one_of(key: str, value: str, known: Sequence[str]) -> None:
        if value not in known:
            problems.append(f"{place.of(key)} must be one of {', '.join(known)}, not {value!r}.{nearest(value, known)}")

    one_of("trainer", recipe.trainer, ("lightning", "composer"))
    one_of("executor.name", recipe.executor.name, tuple(BACKENDS))
    for index, group in enumerate(recipe.fleet.groups):
        one_of(f"fleet.groups.{index}.executor", group.executor, tuple(BACKENDS))
        if group.count < 1:
            problems.append(f"{place.of(f'fleet.groups.{index}.count')} must be at least 1, not {group.count}")
    problems += _templates(recipe, place)
    one_of("codec", recipe.codec, ("float32", "bfloat16", "int8"))
    one_of("scheduler.name", recipe.scheduler.name, ("cosine", "linear", "constant"))
    one_of("fleet.failure_policy", recipe.fleet.failure_policy, ("strict", "skip"))
    one_of("fleet.deadline", recipe.fleet.deadline, ("adaptive", "fixed"))
    one_of("autoloco.outer_device", recipe.autoloco.outer_device, ("cpu", "model"))
    one_of("autoloco.buffers", recipe.autoloco.buffers, ("average", "local"))
    one_of("autoloco.weighting", recipe.autoloco.weighting, ("equal", "tokens"))
    one_of("autoloco.validate_with", recipe.autoloco.validate_with, ("local", "shared"))
    for index, logger in enumerate(recipe.logging.loggers):
        one_of(f"logging.loggers.{index}", logger, LOGGERS)
    if len(set(recipe.logging.loggers)) < len(recipe.logging.loggers):
        refuse("logging.loggers", "different loggers")
    given = [name for name in _TRAINERS_LOGGERS if name in recipe.training.trainer_args]
    if recipe.logging.loggers and given:
        problems.append(f"{place.of(f'training.trainer_args.{given[0]}')}: leave it or logging.loggers out")
    for name in ("model", "data"):
        section = getattr(recipe, name)
        if (section.name is None) == (section.class_ is None):
            said = "both" if section.name else "neither"
            problems.append(
                f"{place.of(name)}: give {name}.name (built in) or {name}.class (the import path of your own), "
                f"not {said}"
            )
    at_least_one = (
        "training.steps training.accumulate training.log_every training.devices training.threads "
        "training.validate_every fleet.replicas fleet.min_replicas fleet.checkpoint_every_rounds "
        "fleet.shared_checkpoint_every_rounds"
    )
    for key in at_least_one.split():
        section, field = key.split(".")
        value = getattr(getattr(recipe, section), field)
        if value is not None and value < 1:
            refuse(key, "at least 1")
    if recipe.fleet.min_replicas is not None and recipe.fleet.min_replicas > recipe.fleet.replicas:
        refuse("fleet.min_replicas", f"at most fleet.replicas ({recipe.fleet.replicas})")
    none_negative = (
        "executor.restarts executor.error_restarts executor.backoff_seconds executor.grace_seconds "
        "scheduler.warmup_steps"
    )
    for key in none_negative.split():
        section, field = key.split(".")
        value = getattr(getattr(recipe, section), field)
        if value is not None and not value >= 0:
            refuse(key, "0 or more")
    if not 0 <= recipe.training.seed < 2**32:
        refuse("training.seed", "between 0 and 4294967295")
    for key in ("timeout_seconds", "start_timeout_seconds"):
        seconds = getattr(recipe.fleet, key)
        if seconds is not None and not 0 < seconds < float("inf"):
            refuse(f"fleet.{key}", "a positive number")
    if not 0 < recipe.optimizer.lr < float("inf"):
        refuse("optimizer.lr", "a positive number")
    if not 0 <= recipe.scheduler.final_fraction <= 1:
        refuse("scheduler.final_fraction", "between 0 and 1")
    if recipe.scheduler.warmup_steps > recipe.training.steps:
        least = max(recipe.training.steps // 10, 0)
        refuse(
            "scheduler.warmup_steps",
            f"at most training.steps ({recipe.training.steps})",
            f" (add scheduler.warmup_steps={least}, or another number)",
        )
    if problems:
        raise RecipeError("; ".join(problem.removesuffix(".") for problem in problems))
    fleet = recipe.fleet
    try:
        guards = guards_of(recipe)
    except ValueError as error:
        raise RecipeError(f"{place.of('fleet.' + str(error).split()[0])}: {error}") from error
    try:
        guards.check_fleet(fleet.replicas)
        guards.check_least(fleet.min_replicas)
        guards.check_settings({"weighting": recipe.autoloco.weighting})
    except ValueError as error:
        raise RecipeError(f"{place.of('fleet.aggregation')}: {error}") from error
    try:
        names = {"own_name": "fleet.checkpoint_every_rounds", "shared_name": "fleet.shared_checkpoint_every_rounds"}
        check_own_checkpoints(fleet.checkpoint_every_rounds, fleet.shared_checkpoint_every_rounds, **names)
    except ValueError as error:
        raise RecipeError(f"{place.of('fleet.checkpoint_every_rounds')}: {error}") from error
    if recipe.store.signing_key_file is not None:
        try:
            find_signing_key(recipe.store.signing_key_file)
        except ValueError as error:
            raise RecipeError(f"{place.of('store.signing_key_file')}: {error}") from error
    try:
        outer_config(recipe)
        policy_of(recipe)
    except RecipeError as error:
        key, _, message = str(error).partition(": ")
        raise RecipeError(f"{place.of(key)}: {message}") from error


def _templates(recipe: Recipe, place: Place) -> list[str]:
    """Options are the same for all replicas of a group: nothing is filled into them."""
    sections = {"executor.options": recipe.executor.options}
    sections |= {f"fleet.groups.{i}.options": group.options for i, group in enumerate(recipe.fleet.groups)}
    return [
        f"{place.of(f'{name}.{key}')}: an option is the same for all replicas, nothing takes the place of '{{replica}}'"
        for name, options in sections.items()
        for key, value in options.items()
        if "{replica}" in str(value)
    ]
