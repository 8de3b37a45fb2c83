"""`launch`: check a recipe, start its fleet wherever it shall run, show it train, sum it up.

Invariant: no replica is left running without being asked to stop when `launch` returns, unless `--detach` is what was
wanted; and nothing is started before every place has said that it would take it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from composer_replication.autoloco.schedule import fixed_intervals
from composer_replication.cli.places import (
    RECIPE_FILE,
    absolute,
    alone_in,
    open_places,
    refuse_used_stores,
    resumed,
    short,
)
from composer_replication.cli.resume import begins_epoch, prepare_resume
from composer_replication.cli.same_run import check_same_run
from composer_replication.cli.view import RunReader
from composer_replication.cli.watch import Watch, allowed_failures
from composer_replication.diloco.serverless.attach import attach
from composer_replication.diloco.serverless.components import check_components
from composer_replication.diloco.serverless.data_trial import try_data
from composer_replication.diloco.serverless.executor import BackendUnavailable, QuotaExceeded
from composer_replication.diloco.serverless.groups import (
    check_store,
    groups_of,
    is_remote,
    make_specs,
    mixed_executor,
    places_to_warn_of,
    remote_recipe,
)
from composer_replication.diloco.serverless.handle import ReplicaHandle
from composer_replication.diloco.serverless.jobs.marks import Marks
from composer_replication.diloco.serverless.jobs.shipping import pack_code
from composer_replication.diloco.serverless.mixed import MixedExecutor
from composer_replication.diloco.serverless.spec import ReplicaSpec
from composer_replication.errors import RecipeError
from composer_replication.recipe import Recipe, claim_folder, load_recipe, policy_of, to_yaml
from composer_replication.store import ObjectStore, open_store

__all__ = ["checked_recipe", "intention", "launch", "least_intervals", "least_rounds", "payloads", "written_specs"]

SENT_RECIPE_FILE = "recipe-for-jobs.yaml"


def launch(
    path: str, overrides: Sequence[str], *, dry_run: bool, resume: bool, plain: bool, detach: bool = False
) -> int:
    recipe = checked_recipe(path, overrides)
    remote = is_remote(recipe)
    if detach and any(not group.remote for group in groups_of(recipe)):
        raise RecipeError("--detach: replicas that are processes of this machine end with the launcher")
    if not resume:
        refuse_used_stores(recipe.store)
    code = pack_code(recipe.executor.code) if remote and recipe.executor.code else None
    shown = _checked_with_places(recipe, code, dry_run=dry_run) if remote else []
    if dry_run:
        read = try_data(recipe)
        print(to_yaml(recipe), end="")
        if shown:
            print(f"---\n{json.dumps(shown, indent=1, default=str)}")
        print(f"# data: {read}")
        print(f"# fine: {intention(recipe)}. Nothing was started.")
        return 0
    # Before a folder is made.
    store = open_places(recipe.store, create=not resume) if recipe.store.uri else None
    recipe = resumed(recipe, store) if resume else claim_folder(recipe)
    assert recipe.output is not None and recipe.store.uri is not None
    folder = Path(recipe.output)
    store = store if store is not None else open_places(recipe.store, create=not resume)
    with alone_in(folder):
        return _launched(recipe, folder, store, code, resume=resume, plain=plain, detach=detach)


def _launched(
    recipe: Recipe, folder: Path, store: ObjectStore, code: bytes | None, *, resume: bool, plain: bool, detach: bool
) -> int:
    """Start the replicas, or find those that run, and look after them."""
    assert recipe.store.uri is not None
    executor = mixed_executor(recipe, folder=folder, code=code)
    words = ""
    if resume:
        running = _running(recipe, store)
        new_epoch = not running and begins_epoch(store, folder, recipe.fleet.replicas)
        if ended := check_same_run(recipe, store, folder / RECIPE_FILE, new_epoch=new_epoch):
            print(ended)
            return 0
        if running:
            words = f"running already, and looked after from here: {_few(running)}"
        else:
            words = prepare_resume(store, folder, recipe.fleet.replicas)
    specs = written_specs(recipe, folder)
    if is_remote(recipe):
        Marks(open_store(recipe.store.uri)).send_recipe(Path(folder / SENT_RECIPE_FILE).read_bytes())
    print(f"{recipe.name}: {intention(recipe)}\nrun folder {short(folder)}, store {recipe.store.uri}", flush=True)
    for text in [*places_to_warn_of(recipe), words]:
        if text:
            print(text, flush=True)
    if detach:
        return _detached(recipe, folder, executor, specs)
    return Watch(recipe, folder, store, executor).run(specs, plain=plain)


def checked_recipe(path: str, overrides: Sequence[str]) -> Recipe:
    """The recipe, with all that can be known of it on this machine checked. Raises RecipeError."""
    recipe = absolute(load_recipe(path, overrides))
    if recipe.executor.code:
        if not Path(recipe.executor.code).is_dir():
            raise RecipeError(f"executor.code: there is no folder {recipe.executor.code}")
        sys.path.insert(0, recipe.executor.code)  # where a job will find the recipe's classes
    check_components(recipe)
    check_store(recipe)
    return recipe


def payloads(recipe: Recipe, code: bytes | None) -> list[dict[str, Any]]:
    """What the back ends will be sent for each replica that runs elsewhere, secrets masked.

    Raises ValueError and ExecutorError for what they would refuse.
    """
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        executor = mixed_executor(recipe, folder=Path(folder), code=code)
        specs = written_specs(recipe, Path(folder))
        executor.check_specs(specs)
        for spec in specs:
            one: Any = executor.executor_of(spec.replica_id) if isinstance(executor, MixedExecutor) else executor
            if one.backend_name != "local":
                payload = one.shown_payload(spec)
                found.append({"replica": spec.replica_id, "back end": one.backend_name, "payload": payload})
    return found


def _checked_with_places(recipe: Recipe, code: bytes | None, *, dry_run: bool) -> list[dict[str, Any]]:
    """`payloads`; of a place that doesn't answer now a fleet that can do without some replicas is only warned."""
    try:
        return payloads(recipe, code)
    except (OSError, QuotaExceeded, BackendUnavailable) as error:
        if dry_run or not allowed_failures(recipe):
            raise
        print(f"going on without the answer of one place: {error}", file=sys.stderr)
        return []


def intention(recipe: Recipe) -> str:
    """What the recipe amounts to, in a line."""
    steps, base = recipe.training.steps, recipe.autoloco.base_horizon
    text = f"{recipe.fleet.replicas} replicas"
    if is_remote(recipe):
        text += f" ({', '.join(f'{len(group.replicas)} on {group.backend}' for group in groups_of(recipe))})"
    text += f", {steps} steps each, policy {recipe.autoloco.policy}"
    least = least_rounds(recipe)
    if least is not None:
        text += f", {least} rounds" if recipe.autoloco.policy == "fixed" else f", {least} rounds at least"
    if recipe.autoloco.policy != "fixed":
        text += f" ({fixed_intervals(steps, base)} with a fixed interval of {base})"
    return text


def least_rounds(recipe: Recipe) -> int | None:
    """How many rounds it takes if every interval goes well; None if the recipe doesn't say the learning rate."""
    intervals = least_intervals(recipe)
    return None if intervals is None else len(intervals)


def least_intervals(recipe: Recipe, *, assumed: bool = False) -> tuple[int, ...] | None:
    """The intervals of such a run. `assumed`: take the recipe's scheduler for that of a model of the user's own."""
    if recipe.model.name is None and not assumed:
        return None
    from composer_replication.autoloco.schedule import run_schedule
    from composer_replication.tasks.optim import lr_factor

    section, steps = recipe.scheduler, recipe.training.steps

    def rate(step: int) -> float:
        return recipe.optimizer.lr * lr_factor(
            step,
            name=section.name,
            steps=steps,
            warmup_steps=section.warmup_steps,
            final_fraction=section.final_fraction,
        )

    return run_schedule(policy_of(recipe), rate, steps).steps


def written_specs(recipe: Recipe, folder: Path) -> list[ReplicaSpec]:
    """The specs, and the recipe in the folder: for this machine, and as others get it."""
    here, elsewhere = folder / RECIPE_FILE, folder / SENT_RECIPE_FILE
    here.write_text(to_yaml(recipe), encoding="utf-8")
    if is_remote(recipe):
        elsewhere.write_text(to_yaml(remote_recipe(recipe)), encoding="utf-8")
    if recipe.store.uri is None:
        recipe = replace(recipe, store=replace(recipe.store, uri=(folder / "store").as_uri()))
    return make_specs(recipe, here=here, elsewhere=elsewhere)


def _running(recipe: Recipe, store: ObjectStore) -> list[ReplicaHandle]:
    """Jobs of an earlier launch that go on. Raises RecipeError if they run elsewhere, or as a fleet of another size."""
    assert recipe.store.uri is not None
    marks = Marks(open_store(recipe.store.uri))
    if not list(marks.handles()) and not marks.jobs():
        return []
    before, handles = attach(recipe.store.uri)
    found = [handle for handle in before.poll(handles) if not handle.ended]
    place = {replica: group.backend for group in groups_of(recipe) for replica in group.replicas}
    if moved := [handle for handle in found if place.get(handle.replica_id) != handle.backend]:
        raise RecipeError(
            f"{_few(moved)}: not where this recipe has it; to move a run, stop it first: "
            f"composer-replication cancel {recipe.store.uri}"
        )
    if found:
        reader = RunReader(store)
        reader.refresh()
        replicas = reader.replicas or recipe.fleet.replicas
        if replicas != recipe.fleet.replicas:
            raise RecipeError(
                f"fleet.replicas={recipe.fleet.replicas}: the fleet runs, with {replicas}; to change that, stop it "
                f"first: composer-replication cancel {recipe.store.uri}"
            )
    return found


def _few(handles: Sequence[ReplicaHandle]) -> str:
    return ", ".join(f"replica {handle.replica_id} on {handle.backend} ({handle.state})" for handle in handles)


def _detached(recipe: Recipe, folder: Path, executor: Any, specs: list[ReplicaSpec]) -> int:
    handles = executor.launch_replicas(specs)
    failed = [handle for handle in handles if not handle.job_id]
    for handle in failed:
        print(f"replica {handle.replica_id} was not taken by {handle.backend}: {handle.reason}", file=sys.stderr)
    uri = recipe.store.uri
    if len(failed) > allowed_failures(recipe):
        executor.cancel(handles)
        print(f"the others can't go on without {'it' if len(failed) == 1 else 'them'} and are stopped", file=sys.stderr)
        return 1
    print(f"launched: {_few([handle for handle in handles if handle.job_id])}")
    print("A replica whose machine is taken is started again only while a launcher looks after the fleet.")
    print(f"watch       composer-replication status {uri} --watch")
    print(f"read        composer-replication logs {uri} --replica 0 --follow")
    print(f"look after  composer-replication launch {short(folder / RECIPE_FILE)} --resume")
    print(f"stop        composer-replication cancel {uri}")
    return 0
