"""`launch`: check a recipe, start its fleet on this machine, show it train, sum it up.

Invariant: no replica is left running when `launch` returns, however it returns.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from composer_replication.cli.live import FleetView, Row, Screen
from composer_replication.cli.resume import begins_epoch, prepare_resume
from composer_replication.cli.same_run import check_same_run
from composer_replication.cli.summary import summarise
from composer_replication.cli.view import RunReader
from composer_replication.collective.object_store import keys
from composer_replication.collective.object_store.place import open_run
from composer_replication.collective.object_store.requests import there
from composer_replication.diloco.serverless.components import check_components
from composer_replication.diloco.serverless.exit_codes import describe
from composer_replication.diloco.serverless.handle import ReplicaHandle
from composer_replication.diloco.serverless.local_process import LocalProcessExecutor
from composer_replication.diloco.serverless.replica_entrypoint import check_writable
from composer_replication.diloco.serverless.spec import ReplicaSpec
from composer_replication.errors import RecipeError, ReplicationError, StoreError, StoreRefused, StoreUnavailable
from composer_replication.recipe import Recipe, claim_folder, load_recipe, policy_of, to_yaml
from composer_replication.recipe.schema import StoreSection
from composer_replication.store import ObjectStore, open_store

__all__ = ["launch"]

_LOOK_SECONDS = 0.5
RECIPE_FILE = "recipe.yaml"


def launch(path: str, overrides: Sequence[str], *, dry_run: bool, resume: bool, plain: bool) -> int:
    recipe = load_recipe(path, overrides)
    section = recipe.store  # the replicas are told places that don't depend on the folder one stands in
    key_file = section.signing_key_file and str(Path(section.signing_key_file).expanduser().absolute())
    places = {"uri": _absolute(section.uri), "control": _absolute(section.control), "signing_key_file": key_file}
    recipe = replace(recipe, store=replace(section, **places))
    check_components(recipe)
    if not resume:
        for name, uri in (("store.uri", recipe.store.uri), ("store.control", recipe.store.control)):
            if uri:
                _refuse_used_store(name, uri)
    if dry_run:
        print(to_yaml(recipe), end="")
        print(f"# fine: {_intention(recipe)}. Nothing was started.")
        return 0
    store = _open(recipe.store) if recipe.store.uri else None  # before a folder is made
    recipe = _resumed(recipe, store) if resume else claim_folder(recipe)
    assert recipe.output is not None and recipe.store.uri is not None
    folder = Path(recipe.output)
    store = store if store is not None else _open(recipe.store)
    resumed = ""
    if resume:
        new_epoch = begins_epoch(store, folder, recipe.fleet.replicas)
        if ended := check_same_run(recipe, store, folder / RECIPE_FILE, new_epoch=new_epoch):
            print(ended)
            return 0
        resumed = prepare_resume(store, folder, recipe.fleet.replicas)
    (folder / RECIPE_FILE).write_text(to_yaml(recipe), encoding="utf-8")
    executor = _executor(recipe, folder)
    specs = [
        ReplicaSpec(
            i, recipe.fleet.replicas, recipe.store.uri, recipe=str(folder / RECIPE_FILE), trainer=recipe.trainer
        )
        for i in range(recipe.fleet.replicas)
    ]
    print(f"{recipe.name}: {_intention(recipe)}\nrun folder {_short(folder)}, store {recipe.store.uri}", flush=True)
    if resumed:
        print(resumed, flush=True)
    return _Launch(recipe, folder, store, executor).run(specs, plain=plain)


def _intention(recipe: Recipe) -> str:
    steps, base = recipe.training.steps, recipe.autoloco.base_horizon
    text = f"{recipe.fleet.replicas} replicas, {steps} steps each, policy {recipe.autoloco.policy}"
    if recipe.model.name is not None:
        from composer_replication.autoloco.schedule import run_schedule
        from composer_replication.tasks.optim import lr_factor

        section = recipe.scheduler

        def rate(step: int) -> float:
            return recipe.optimizer.lr * lr_factor(
                step,
                name=section.name,
                steps=steps,
                warmup_steps=section.warmup_steps,
                final_fraction=section.final_fraction,
            )

        least = run_schedule(policy_of(recipe), rate, steps).rounds
        text += f", {least} rounds" if recipe.autoloco.policy == "fixed" else f", {least} rounds at least"
    if recipe.autoloco.policy != "fixed":
        text += f" ({-(-steps // base)} with a fixed interval of {base})"
    return text


def _absolute(uri: str | None) -> str | None:
    return Path(uri).expanduser().absolute().as_uri() if uri and "://" not in uri else uri


def _refuse_used_store(name: str, uri: str) -> None:
    try:
        used = bool(open_store(uri, create=False).list("fleet.json"))
    except ValueError as error:
        raise RecipeError(f"{name}: {error}") from error
    except (StoreRefused, StoreUnavailable):  # no replica will fare better: say so before any starts
        raise
    except StoreError:  # a folder that isn't there yet: opened for real later, with its own message
        return
    if used:
        raise RecipeError(
            f"{name}: there is a run in {uri} already. Give another place ({name}=...), leave store.uri out to "
            "use a folder of the run's own, or go on with that run: launch its recipe.yaml with --resume"
        )


def _open(section: StoreSection) -> ObjectStore:
    """The store, tried: a place that can't be written is found out before replicas are started."""
    opened: dict[str, ObjectStore] = {}
    for name, uri in (("store.uri", section.uri), ("store.control", section.control)):
        if uri:
            try:
                opened[name] = open_store(uri)
            except ValueError as error:
                raise RecipeError(f"{name}: {error}") from error
            check_writable(opened[name])
    return open_run(opened["store.uri"], control=opened.get("store.control"), signing_key=section.signing_key_file)


def _resumed(recipe: Recipe, store: ObjectStore | None) -> Recipe:
    folder = Path(recipe.folder).expanduser().absolute()
    if not (folder / RECIPE_FILE).is_file():
        # On another machine the store is all there is of a run.
        if store is None or not there(store, keys.FLEET):
            where = f"{folder}, nor in {store.uri}" if store is not None else str(folder)
            raise RecipeError(
                f"--resume: there is no run in {where}; launch the recipe.yaml of a run's folder, for example "
                "runs/quickstart/recipe.yaml, or give the run's store (store.uri=...)"
            )
        folder.mkdir(parents=True, exist_ok=True)
    uri = recipe.store.uri or (folder / "store").as_uri()
    return replace(recipe, output=str(folder), store=replace(recipe.store, uri=uri))


def _executor(recipe: Recipe, folder: Path) -> LocalProcessExecutor:
    section, env = recipe.executor, dict(recipe.executor.env)
    if recipe.training.threads is not None:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            env.setdefault(name, str(recipe.training.threads))
    return LocalProcessExecutor(
        output=folder,
        restarts=section.restarts,
        backoff_seconds=1.0 if section.backoff_seconds is None else section.backoff_seconds,
        grace_seconds=section.grace_seconds,
        error_restarts=section.error_restarts,
        env=env,
    )


def _short(path: Path) -> Path:
    """Relative to where one stands, if it is below."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


class _Stop(BaseException):
    """SIGTERM: stop the fleet, then end."""


def _on_sigterm(number: int, frame: Any) -> None:
    raise _Stop


class _Launch:
    def __init__(self, recipe: Recipe, folder: Path, store: ObjectStore, executor: LocalProcessExecutor) -> None:
        self.recipe = recipe
        self.folder = folder
        self.reader = RunReader(store)
        self.executor = executor
        self.handles: list[ReplicaHandle] = []
        self.began = time.monotonic()
        self._told: dict[int, int] = {}
        self._seen = FleetView(title=recipe.name, rows=())

    def run(self, specs: list[ReplicaSpec], *, plain: bool) -> int:
        before = signal.signal(signal.SIGTERM, _on_sigterm)
        code = 1
        try:
            self.handles = self.executor.launch_replicas(specs)
            with Screen(plain) as screen:
                code = self._watch(screen)
        except (KeyboardInterrupt, _Stop) as stop:
            code = 130 if isinstance(stop, KeyboardInterrupt) else 143
            self._stop(
                f"stopping; a replica has {self.executor.grace_seconds:g} s to write its checkpoint (again: kill)"
            )
            print(f"interrupted. Go on with: composer-replication launch {_short(self.folder / RECIPE_FILE)} --resume")
            return code
        finally:
            self._stop("")
            signal.signal(signal.SIGTERM, before)
        results = self.executor.collect(self.handles, timeout=10.0)
        self._blame()
        with contextlib.suppress(ReplicationError):  # the summary is then of what was seen
            self.reader.refresh()
        seconds = time.monotonic() - self.began
        fine = summarise(self.recipe, self.folder, self.reader.rounds, results, seconds=seconds)
        return code if fine else code or 1

    def _watch(self, screen: Screen) -> int:
        allowed = 0
        if self.recipe.fleet.failure_policy == "skip":
            replicas = self.recipe.fleet.replicas
            allowed = replicas - (self.recipe.fleet.min_replicas or replicas // 2 + 1)
        while True:
            self.handles = self.executor.poll(self.handles)
            self._tell_restarts(screen)
            screen.show(self._view())
            failed = [h.replica_id for h in self.handles if h.ended and h.state != "completed"]
            if len(failed) > allowed:
                screen.say(f"replica {failed[0]} has failed; the others can't go on without it and are stopped")
                return 1
            if all(handle.ended for handle in self.handles):
                return 1 if failed else 0
            self.executor.wait(self.handles, _LOOK_SECONDS)

    def _tell_restarts(self, screen: Screen) -> None:
        for handle in self.handles:
            if handle.restarts > self._told.get(handle.replica_id, 0):
                self._told[handle.replica_id] = handle.restarts
                why = describe(handle.exit_code) if handle.exit_code is not None else "it ended"
                section = self.recipe.executor
                allowed = section.restarts + section.error_restarts
                screen.say(f"replica {handle.replica_id}: {why}; restart {handle.restarts} of {allowed}")

    def _view(self) -> FleetView:
        title = self.recipe.name
        try:
            self.reader.refresh()
            self._seen = self.reader.view(title)
        except ReplicationError as error:  # the replicas try again by themselves; so does the next look
            title = f"{title}: the store doesn't answer ({error})"
        view = replace(self._seen, title=title)
        known = {row.replica: row for row in view.rows}
        rows: list[Row] = []
        for handle in self.handles:
            row = known.get(handle.replica_id, Row(replica=handle.replica_id, state="starting"))
            if handle.state != "running":
                row = replace(row, state="restarting" if handle.will_retry else handle.state)
            if handle.restarts:
                row = replace(row, note=f"restart {handle.restarts}")
            rows.append(row)
        own = {handle.replica_id for handle in self.handles}
        rows += [row for row in view.rows if row.replica not in own]  # started elsewhere, they have joined
        return replace(view, rows=rows, steps=self.recipe.training.steps)

    def _stop(self, words: str) -> None:
        """Stop what still runs. Asked again meanwhile: kill."""
        if all(handle.ended for handle in self.executor.poll(self.handles)):
            return
        if words:
            print(words, flush=True)
        try:
            self.executor.cancel(self.handles)
        except (KeyboardInterrupt, _Stop):
            self.executor.grace_seconds = 0.0
            self.executor.cancel(self.handles)

    def _blame(self) -> None:
        """The last words of the replicas that failed by themselves."""
        self.handles = self.executor.poll(self.handles)
        for handle in self.handles:
            if handle.state == "failed":
                why = describe(handle.exit_code) if handle.exit_code is not None else "it could not be started"
                print(
                    f"\nreplica {handle.replica_id} failed: {why}. The end of its log ({handle.log_url}):",
                    file=sys.stderr,
                )
                for line in self.executor.last_lines(handle, 15) if handle.job_id else []:
                    print(f"  | {line}", file=sys.stderr)
