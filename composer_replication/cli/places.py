"""`launch`: the places that a run needs before anything is started, its store and its folder.

Invariant: a place that can't be used is found out here, by name, and nothing of another run is touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from composer_replication.collective.object_store import keys
from composer_replication.collective.object_store.place import open_run
from composer_replication.collective.object_store.requests import there
from composer_replication.diloco.serverless.jobs.marks import PREFIX, Marks
from composer_replication.diloco.serverless.locks import locked
from composer_replication.diloco.serverless.replica_entrypoint import check_writable
from composer_replication.errors import RecipeError, StoreError, StoreRefused, StoreUnavailable
from composer_replication.recipe import Recipe, with_group
from composer_replication.recipe.schema import StoreSection
from composer_replication.store import ObjectStore, open_store

__all__ = ["RECIPE_FILE", "absolute", "alone_in", "open_places", "refuse_used_stores", "resumed", "short"]

RECIPE_FILE = "recipe.yaml"
_HANDLES = f"{PREFIX}handles/"


def absolute(recipe: Recipe) -> Recipe:
    """The recipe with places that don't depend on the folder that one stands in."""
    section = recipe.store
    key_file = section.signing_key_file and str(Path(section.signing_key_file).expanduser().absolute())
    store = replace(section, uri=_uri(section.uri), control=_uri(section.control), signing_key_file=key_file)
    code = recipe.executor.code and str(Path(recipe.executor.code).expanduser().absolute())
    return replace(recipe, store=store, executor=replace(recipe.executor, code=code))


def _uri(uri: str | None) -> str | None:
    return Path(uri).expanduser().absolute().as_uri() if uri and "://" not in uri else uri


def refuse_used_stores(section: StoreSection) -> None:
    """Raise RecipeError if there is a run in one of them already."""
    for name, uri in (("store.uri", section.uri), ("store.control", section.control)):
        if uri:
            _refuse_used_store(name, uri)


def _refuse_used_store(name: str, uri: str) -> None:
    try:
        store = open_store(uri, create=False)
        used, launched = bool(store.list("fleet.json")), _launched(store)
    except ValueError as error:
        raise RecipeError(f"{name}: {error}") from error
    except (StoreRefused, StoreUnavailable):  # no replica will fare better: say so before any starts
        raise
    except StoreError:  # a folder that isn't there yet: opened for real later, with its own message
        return
    if used or launched:
        what = "a run" if used else "a launch"
        raise RecipeError(
            f"{name}: there is {what} in {uri} already. Give another place ({name}=...), leave store.uri out to "
            "use a folder of the run's own, or go on with that run: launch its recipe.yaml with --resume"
        )


def _launched(store: ObjectStore) -> bool:
    """Has anybody started jobs for this store? Their handles say so, or the replicas themselves."""
    return bool(store.list(_HANDLES) or Marks(store).jobs())


def open_places(section: StoreSection, *, create: bool = True) -> ObjectStore:
    """The store, tried: a place that can't be written is found out before replicas are started. Without `create`, a
    folder that isn't there is none: a run that goes on has one."""
    opened: dict[str, ObjectStore] = {}
    for name, uri in (("store.uri", section.uri), ("store.control", section.control)):
        if uri:
            try:
                opened[name] = open_store(uri, create=create)
            except ValueError as error:
                raise RecipeError(f"{name}: {error}") from error
            check_writable(opened[name])
    return open_run(opened["store.uri"], control=opened.get("store.control"), signing_key=section.signing_key_file)


def resumed(recipe: Recipe, store: ObjectStore | None) -> Recipe:
    """The recipe with the folder and the store of the run that it goes on with. Raises RecipeError if there is none."""
    folder = Path(recipe.folder).expanduser().absolute()
    if not (folder / RECIPE_FILE).is_file():
        # On another machine the store is all there is of a run.
        if store is None or not (there(store, keys.FLEET) or _launched(open_store(str(recipe.store.uri)))):
            where = f"{folder}, nor in {store.uri}" if store is not None else str(folder)
            raise RecipeError(
                f"--resume: there is no run in {where}; launch the recipe.yaml of a run's folder, for example "
                "runs/quickstart/recipe.yaml, or give the run's store (store.uri=...)"
            )
        folder.mkdir(parents=True, exist_ok=True)
    uri = recipe.store.uri or (folder / "store").as_uri()
    return with_group(replace(recipe, output=str(folder), store=replace(recipe.store, uri=uri)))


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Raise RecipeError while another launcher looks after the run of this folder. The lock ends with its process."""
    with locked(folder / ".launcher.lock") as free:  # or without locks: then claims in the store decide
        if not free:
            raise RecipeError(
                f"another launcher looks after the run in {short(folder)}: stop it first; to watch that run, "
                "composer-replication status STORE --watch"
            )
        yield


def short(path: Path) -> Path:
    """Relative to where one stands, if it is below."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
