"""From a recipe to executors: which replicas run where, with which settings, and what those places are sent.

Invariant: an option that no executor takes is a RecipeError that names the key and the nearest that one takes, found
out from signatures: no vendor's client is loaded for it. What leaves this machine names no place on it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

from composer_replication.diloco.serverless.executor import BaseExecutor
from composer_replication.diloco.serverless.mixed import MixedExecutor
from composer_replication.diloco.serverless.plain_values import fits, in_words, misfit
from composer_replication.diloco.serverless.spec import ReplicaSpec
from composer_replication.errors import RecipeError
from composer_replication.recipe import Recipe
from composer_replication.recipe.backends import BACKENDS
from composer_replication.recipe.messages import nearest
from composer_replication.store.signing_key import SIGNING_KEY

__all__ = [
    "Group",
    "check_store",
    "environment_of",
    "executor_class",
    "groups_of",
    "is_remote",
    "make_executor",
    "make_specs",
    "mixed_executor",
    "option_defaults",
    "option_names",
    "places_to_warn_of",
    "remote_recipe",
]

# Said in the recipe by keys of their own, or by who launches.
_OBJECTS = {"credential", "credentials"}  # of programs: nothing that a file could hold
_NOT_OPTIONS = {"code": "executor.code", "output": "output, the run's folder"}


@dataclass(frozen=True)
class Group:
    """Replicas in one place."""

    backend: str
    replicas: range
    key: str  # the recipe's, for messages
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def remote(self) -> bool:
        return self.backend != "local"


def groups_of(recipe: Recipe) -> tuple[Group, ...]:
    """The recipe's groups; without any, its executor has all replicas. Raises RecipeError for unknown options."""
    common = recipe.executor.options
    if not recipe.fleet.groups:
        groups = (Group(recipe.executor.name, range(recipe.fleet.replicas), "executor", common),)
        _check_options(groups[0], common)
        return groups
    found: list[Group] = []
    taken: set[str] = set()
    first = 0
    for index, section in enumerate(recipe.fleet.groups):
        known = option_names(section.executor)
        shared = {name: value for name, value in common.items() if name in known}
        taken |= set(shared)
        replicas = range(first, first + section.count)
        group = Group(section.executor, replicas, f"fleet.groups.{index}", {**shared, **section.options})
        _check_options(group, section.options)
        found.append(group)
        first += section.count
    every = sorted({name for group in found for name in option_names(group.backend)})
    for name in common:
        if name not in taken:
            raise RecipeError(f"executor.options.{name}: none of the groups takes it.{nearest(name, every)}")
    return tuple(found)


def is_remote(recipe: Recipe) -> bool:
    """Does any replica run elsewhere?"""
    return any(name != "local" for name in _backends(recipe))


def _backends(recipe: Recipe) -> list[str]:
    return [group.executor for group in recipe.fleet.groups] or [recipe.executor.name]


def executor_class(backend: str) -> type[BaseExecutor]:
    place = BACKENDS[backend]
    return getattr(import_module(place.module), place.name)


def option_names(backend: str) -> tuple[str, ...]:
    """What `options` may hold: the keyword arguments of the executor and of the classes that it hands them on to."""
    found = {parameter.name for parameter in _parameters(backend)}
    return tuple(sorted(found - _elsewhere(backend).keys() - _OBJECTS))


def option_defaults(backend: str) -> dict[str, Any]:
    """What the options are when nothing is said; those that must be said aren't in it."""
    found: dict[str, Any] = {}
    for parameter in _parameters(backend):
        if parameter.default is not parameter.empty:
            found.setdefault(parameter.name, parameter.default)
    return found


def _parameters(backend: str) -> list[inspect.Parameter]:
    """The keyword arguments of the executor, then those of the classes that it hands others on to."""
    found: list[inspect.Parameter] = []
    for kind in executor_class(backend).__mro__:
        if "__init__" not in vars(kind):
            continue
        parameters = inspect.signature(vars(kind)["__init__"]).parameters.values()
        found += [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return found


def _hints(backend: str) -> dict[str, Any]:
    """The options' types."""
    found: dict[str, Any] = {}
    for kind in reversed(executor_class(backend).__mro__):
        if "__init__" in vars(kind) and kind.__module__.startswith("composer_replication."):
            found |= get_type_hints(vars(kind)["__init__"])
    return found


def _elsewhere(backend: str) -> Mapping[str, str]:
    """An executor of jobs has an `output` of its own: where in the container a volume is mounted."""
    return _NOT_OPTIONS if backend == "local" else {"code": _NOT_OPTIONS["code"]}


def _check_options(group: Group, options: Mapping[str, Any]) -> None:
    key = f"{group.key}.options"
    for name in options:
        if name in _elsewhere(group.backend):
            raise RecipeError(f"{key}.{name}: say it with {_elsewhere(group.backend)[name]}")
        known = option_names(group.backend)
        if name not in known:
            hint = nearest(name, known) or f" There are: {', '.join(known)}."
            raise RecipeError(f"{key}.{name}: {group.backend} has no option {name!r}.{hint}")
    hints = _hints(group.backend)
    for name, value in group.options.items():
        if not fits(value, hints[name]):
            where = key if name in options else "executor.options"
            raise RecipeError(f"{where}.{name} must be {in_words(hints[name])}, not {misfit(value, hints[name])}")


def make_executor(group: Group, recipe: Recipe, *, folder: Path | None = None, code: bytes | None = None) -> Any:
    """The group's executor. `folder` is the run's on this machine, `code` what jobs are sent. Raises RecipeError."""
    section, options = recipe.executor, {name: value for name, value in group.options.items() if name != "env"}
    env = environment_of(group, recipe)
    settings: dict[str, Any] = {"restarts": section.restarts, "error_restarts": section.error_restarts, "env": env}
    if section.backoff_seconds is not None:
        settings["backoff_seconds"] = section.backoff_seconds
    if group.remote:
        settings |= {"requirements": list(section.requirements), "code": code, "run_name": recipe.name}
    else:
        settings |= {"output": folder, "grace_seconds": section.grace_seconds}
    given = {**settings, **options}
    if missing := [p.name for p in _parameters(group.backend) if p.default is p.empty and p.name not in given]:
        raise RecipeError(f"{group.key}.options: {group.backend} needs {', '.join(missing)}")
    try:
        return executor_class(group.backend)(**given)
    except (ValueError, TypeError) as error:
        raise RecipeError(f"{group.key}.options: {error}") from error


def environment_of(group: Group, recipe: Recipe) -> dict[str, str]:
    """What the group's replicas have in their environment beyond what is there already."""
    section = recipe.executor
    env = {**section.env, **(group.options.get("env") or {})}
    if recipe.training.threads is not None:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            env.setdefault(name, str(recipe.training.threads))
    if section.code and not group.remote:  # jobs find it in their working directory
        env["PYTHONPATH"] = os.pathsep.join(
            [str(Path(section.code).absolute()), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
    return env


def mixed_executor(recipe: Recipe, *, folder: Path | None = None, code: bytes | None = None) -> Any:
    """The executor of the recipe's whole fleet."""
    made = [(make_executor(g, recipe, folder=folder, code=code), len(g.replicas)) for g in groups_of(recipe)]
    return made[0][0] if len(made) == 1 else MixedExecutor(made)


def remote_recipe(recipe: Recipe) -> Recipe:
    """As replicas elsewhere get it, and launchers on other machines: without places on this one."""
    store = replace(recipe.store, signing_key_file=None)  # the key itself comes by the environment
    return replace(recipe, output=None, store=store, executor=replace(recipe.executor, code=None))


def make_specs(recipe: Recipe, *, here: Path, elsewhere: Path) -> list[ReplicaSpec]:
    """One spec for each replica; `here` and `elsewhere` are the recipe's file for this machine and for others."""
    assert recipe.store.uri is not None
    key = _signing_key(recipe)
    specs: list[ReplicaSpec] = []
    for group in groups_of(recipe):
        file, env = (elsewhere, {SIGNING_KEY: key} if key else None) if group.remote else (here, None)
        specs += [
            ReplicaSpec(
                replica,
                recipe.fleet.replicas,
                recipe.store.uri,
                recipe=str(file),
                trainer=recipe.trainer,
                extra_env=env,
            )
            for replica in group.replicas
        ]
    return specs


def _signing_key(recipe: Recipe) -> str:
    """The key's text, for replicas that can't read this machine's files."""
    if recipe.store.signing_key_file is None:
        return os.environ.get(SIGNING_KEY, "")
    try:
        return Path(recipe.store.signing_key_file).read_text(encoding="ascii").strip()
    except UnicodeDecodeError:
        raise RecipeError(
            f"store.signing_key_file: {recipe.store.signing_key_file} isn't text, and only text can be handed to "
            "replicas elsewhere, in an environment variable: make one with openssl rand -base64 32"
        ) from None


def check_store(recipe: Recipe) -> None:
    """Raise RecipeError if replicas elsewhere have no store that they could reach."""
    for group in groups_of(recipe):
        if not group.remote:
            continue
        scheme = executor_class(group.backend).default_scheme
        example = f"store.uri={_EXAMPLES.get(scheme, scheme + '://...')}"
        for name, uri in (("store.uri", recipe.store.uri), ("store.control", recipe.store.control)):
            if uri is None and name == "store.uri":
                raise RecipeError(
                    f"store.uri: replicas on {group.backend} can't reach a folder of this machine; give the run a "
                    f"prefix of its own in a store that all of them can, such as {example}"
                )
            if uri is not None and uri.startswith("memory:"):
                raise RecipeError(f"{name}: {uri} is this process's own; replicas on {group.backend} need {example}")


_EXAMPLES = {
    "s3": "s3://bucket/runs/NAME",
    "gs": "gs://bucket/runs/NAME",
    "az": "az://container/runs/NAME",
    "hf": "hf://datasets/OWNER/RUNS/NAME",
    "file": "s3://bucket/runs/NAME, or file:///shared/NAME on a volume that is mounted there",
}


def places_to_warn_of(recipe: Recipe) -> list[str]:
    """What may be meant, and works only if other machines are set up for it."""
    found: list[str] = []
    for group in groups_of(recipe):
        for name, uri in (("store.uri", recipe.store.uri), ("store.control", recipe.store.control)):
            if group.remote and uri is not None and (uri.startswith("file:") or "://" not in uri):
                found.append(
                    f"{name}: {uri} is a folder: replicas on {group.backend} must have it mounted under the same path"
                )
    return found
