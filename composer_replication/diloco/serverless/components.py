"""From a recipe's model and data sections to objects, and the check that this will work before anything is started.

Invariant: a built-in name or an import path is resolved in one place; whatever is wrong with it or with its arguments
is a RecipeError that names the key.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from composer_replication import tasks
from composer_replication.diloco.serverless.loggers import check_loggers
from composer_replication.errors import RecipeError, StoreError
from composer_replication.recipe.messages import nearest
from composer_replication.recipe.schema import DataSection, ModelSection, Recipe
from composer_replication.tasks.optim import build_optimizer, build_scheduler
from composer_replication.tasks.shapes import trained_parameters

__all__ = [
    "build_data",
    "build_model",
    "check_components",
    "optimizer_maker",
    "parameter_count",
    "resolve",
    "scheduler_maker",
]

_TABLES = {"model": tasks.MODELS, "data": tasks.DATA}


def resolve(path: str, key: str) -> Any:
    """The object at an import path, `package.module.Name` or `package.module:Name`. Raises RecipeError."""
    module, separator, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not separator or not module or not name:
        raise RecipeError(f"{key}: {path!r} isn't an import path like my_package.my_module.MyClass")
    try:
        return getattr(import_module(module), name)
    except ImportError as error:
        raise RecipeError(
            f"{key}: {path!r} can't be imported ({error}); is its folder the present one, or its package installed?"
        ) from error
    except AttributeError:
        known = vars(import_module(module))
        raise RecipeError(f"{key}: the module {module} has no {name!r}.{nearest(name, known)}") from None


def _target(section: ModelSection | DataSection, kind: Literal["model", "data"]) -> Any:
    if section.class_ is not None:
        return resolve(section.class_, f"{kind}.class")
    table = _TABLES[kind]
    assert section.name is not None
    if section.name not in table:
        raise RecipeError(
            f"{kind}.name: there is no built-in {kind} {section.name!r}, only {', '.join(table)}; your own goes into "
            f"{kind}.class.{nearest(section.name, table)}"
        )
    return resolve(table[section.name], f"{kind}.name")


def _check_arguments(target: Callable[..., Any], args: Mapping[str, Any], key: str) -> None:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # some classes of extension modules don't tell
        return
    parameters = signature.parameters.values()
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for name in args:
        if name not in named and not open_ended:
            raise RecipeError(
                f"{key}.{name}: {target.__qualname__} takes no {name!r}, only {', '.join(named) or 'nothing'}."
                f"{nearest(name, named)}"
            )
    for p in parameters:
        if p.default is p.empty and p.name in named and p.name not in args:
            raise RecipeError(f"{key}: {target.__qualname__} needs {p.name!r}")


def _build(section: ModelSection | DataSection, kind: Literal["model", "data"]) -> Any:
    target = _target(section, kind)
    _check_arguments(target, section.args, f"{kind}.args")
    try:
        return target(**section.args)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{kind}.args: {error}") from error


def build_model(recipe: Recipe) -> nn.Module:
    """A built-in model, or the user's own object, constructed."""
    return _build(recipe.model, "model")


def parameter_count(recipe: Recipe) -> int | None:
    """Trained parameters of a built-in model, of which only the shapes are made; None if nobody can tell here.

    A model of the user's own isn't built, as it may fetch gigabytes; one of the Hub is looked up by its config alone.
    """
    if recipe.model.name is None:
        return None
    try:
        target = _target(recipe.model, "model")
        _check_arguments(target, recipe.model.args, "model.args")
        return trained_parameters(recipe.model.name, target, recipe.model.args)
    except (RecipeError, StoreError, TypeError, ValueError):
        return None


def build_data(recipe: Recipe) -> Any:
    """Built-in data (`tasks.text.TextData`), or the user's own object, constructed."""
    return _build(recipe.data, "data")


def optimizer_maker(recipe: Recipe) -> Callable[[nn.Module], Optimizer]:
    section = recipe.optimizer
    return lambda model: build_optimizer(
        model.parameters(), name=section.name, lr=section.lr, weight_decay=section.weight_decay, args=section.args
    )


def scheduler_maker(recipe: Recipe) -> Callable[[Optimizer], Any]:
    section = recipe.scheduler
    return lambda optimizer: build_scheduler(
        optimizer,
        name=section.name,
        steps=recipe.training.steps,
        warmup_steps=section.warmup_steps,
        final_fraction=section.final_fraction,
    )


def check_components(recipe: Recipe) -> None:
    """Raise RecipeError if trainer, model, data, optimizer or schedule can't be had from this recipe.

    Small built-in ones are built and tried together; of the others, only what can be known without running them is
    looked at: that they can be imported and take these arguments.
    """
    if find_spec(recipe.trainer) is None:
        raise RecipeError(
            f"trainer: {recipe.trainer} isn't installed: pip install 'composer-replication[{recipe.trainer}]'"
        )
    if "local" in ([group.executor for group in recipe.fleet.groups] or [recipe.executor.name]):
        check_loggers(recipe)
    if recipe.data.name is not None and recipe.data.name not in tasks.LARGE:
        data = build_data(recipe)
    else:
        data = None
        _check_arguments(_target(recipe.data, "data"), recipe.data.args, "data.args")
    if recipe.model.name is None or recipe.model.name in tasks.LARGE:
        _check_arguments(_target(recipe.model, "model"), recipe.model.args, "model.args")
        return
    model = build_model(recipe)
    try:
        optimizer = optimizer_maker(recipe)(model)
        scheduler_maker(recipe)(optimizer)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"optimizer: {error}") from error
    context = getattr(model, "context", None)
    if data is not None and context is not None and data.train.context > context:
        raise RecipeError(
            f"data.args.context ({data.train.context}) is longer than the model's, model.args.context ({context})"
        )
