"""Another machine's way to a run's jobs: the store says which they are, and how the back ends are reached.

Invariant: needs the store and the back ends' own credentials, nothing of the machine that launched. Starts nothing.
"""

from __future__ import annotations

from typing import Any

from composer_replication.diloco.serverless.groups import Group, make_executor, mixed_executor
from composer_replication.diloco.serverless.handle import ReplicaHandle
from composer_replication.diloco.serverless.jobs.marks import Marks
from composer_replication.diloco.serverless.mixed import MixedExecutor
from composer_replication.errors import ExecutorError, RecipeError
from composer_replication.recipe import Recipe, recipe_from
from composer_replication.recipe.backends import BACKENDS
from composer_replication.store import open_store

__all__ = ["attach", "launched_recipe"]


def launched_recipe(uri: str) -> Recipe | None:
    """The recipe of the newest launch, as its jobs got it."""
    data = Marks(open_store(uri, create=False)).recipe()
    if data is None:
        return None
    try:
        return recipe_from(data.decode("utf-8"), file=f"{uri}/launch/recipe.json")
    except (RecipeError, UnicodeDecodeError) as error:
        raise ExecutorError(f"the recipe of the launch in {uri} can't be used: {error}") from error


def attach(uri: str) -> tuple[Any, list[ReplicaHandle]]:
    """(an executor for the run's jobs, their handles). Raises ExecutorError if nothing was launched from here."""
    store = open_store(uri, create=False)
    marks = Marks(store)
    handles = list(marks.handles())
    if not handles and not marks.jobs():
        raise ExecutorError(
            f"{store.uri} knows of no jobs. Replicas that `launch` runs as processes of its own machine write "
            "replica-N/log.txt in the run's folder there; Ctrl-C or SIGTERM to the launcher stops them"
        )
    recipe = launched_recipe(uri)
    if recipe is None and not handles:
        raise ExecutorError(
            f"{store.uri} holds words of {', '.join(marks.jobs().values())}, and nothing on where they run: attach to "
            "them with the executor that launched them"
        )
    executor = mixed_executor(recipe) if recipe is not None else _by_name(handles)
    attached = {handle.replica_id: handle for handle in executor.attach(uri)}
    known = {handle.replica_id for handle in handles}
    handles = sorted([*handles, *(h for r, h in attached.items() if r not in known)], key=lambda h: h.replica_id)
    if lost := [handle for handle in handles if handle.replica_id not in attached]:
        # The newest launch was elsewhere; these are of one before it.
        executor = MixedExecutor([*_groups(executor), *_groups(_by_name(lost))])
        executor.attach(uri)
    return executor, handles


def _by_name(handles: list[ReplicaHandle]) -> MixedExecutor:
    """Launched by a program, without a recipe: the back ends with their usual settings."""
    recipe, count = Recipe(), max(handle.replica_id for handle in handles) + 1
    backends = sorted({handle.backend for handle in handles})
    if unknown := [name for name in backends if name not in BACKENDS]:
        raise ExecutorError(f"there are jobs on {', '.join(unknown)}, which this version doesn't know")
    return MixedExecutor([(make_executor(Group(n, range(count), "executor"), recipe), count) for n in backends])


def _groups(executor: Any) -> list[tuple[Any, int]]:
    if isinstance(executor, MixedExecutor):
        return [(one, len(replicas)) for one, replicas in executor.groups]
    return [(executor, 1)]
