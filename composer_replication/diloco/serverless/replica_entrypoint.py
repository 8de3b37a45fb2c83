"""Run one replica: the command that every executor starts in its job.

    python -m composer_replication.diloco.serverless.replica_entrypoint \\
        --recipe recipe.yaml --replica-id 0 --num-replicas 4 --rendezvous-uri file:///shared/run1

Invariant: this module decides nothing about training. It finds out who it is, checks the store, hands over to the
trainer named by the recipe, and turns the way that ends into an exit code (`exit_codes.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import threading
import traceback
import uuid
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from composer_replication import __version__
from composer_replication.diloco.serverless.exit_codes import Exit
from composer_replication.errors import (
    Diverged,
    Fenced,
    FleetError,
    Interrupted,
    RecipeError,
    ReplicaTaken,
    ReplicationError,
    RoundAborted,
    RoundError,
    StoreError,
)
from composer_replication.isolate import LAUNCHERS, REPLICA, REPLICAS, STORE, Identity, isolate_world, read_identity
from composer_replication.store.base import ObjectStore
from composer_replication.tasks import DATA_URI, MODELS

__all__ = ["check_writable", "main", "run", "settings", "stop_with_launcher", "train"]

_WORLDS = ("composer", "torchrun", "slurm", "openmpi", "mpi")  # launchers whose processes are one world

_EPILOG = f"""\
Identity and store may come from the environment instead: {REPLICA}, {REPLICAS}, {STORE}.
Without a recipe, --model-id and the options after it describe a run with the fixed interval (DiLoCo). A model of the
Hugging Face Hub, or in a folder with a config.json, is trained in bfloat16 as a causal language model on the text at
the environment's DATA_URI: a file or a folder of .txt, .jsonl or .parquet files, or data.args.uri=...

exit codes: 0 completed, 1 an exception in the model's or the data's code, 2 wrong arguments, 3 a recipe or settings
that don't fit, 4 fenced (a newer process has taken this replica over), 5 aborted (replicas were missing), 6 diverged,
7 the store failed, 8 a live process holds this replica's id, 75 or 143 asked to stop, checkpoint written. A replica
that is started again with the same arguments goes on from its newest checkpoint.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m composer_replication.diloco.serverless.replica_entrypoint",
        description="Train one replica of a fleet.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--replica-id", type=int, help="this replica's id, from 0")
    add("--num-replicas", type=int, help="how many replicas the fleet has")
    add("--rendezvous-uri", help="URI of the store that the fleet shares")
    add("--launcher", choices=[*LAUNCHERS, "auto"], help="take the id from this launcher's variables")
    add("--recipe", help="recipe file (docs/recipes.md)")
    add("overrides", nargs="*", metavar="key=value", help="put over the recipe")
    add("--output", help="folder for checkpoints and result (default: the recipe's output, replica-ID)")
    add("--stop-with-launcher", action="store_true", help="stop when standard input ends")
    by_hand = parser.add_argument_group("without a recipe")
    add = by_hand.add_argument
    add("--trainer", default="lightning", choices=["lightning", "composer"], help="default lightning")
    add("--model-id", default="byte_gpt", help="owner/name, a folder, a built-in model or an import path (byte_gpt)")
    add("--inner-optimizer", default="{}", help='JSON, e.g. \'{"name": "AdamW", "lr": 0.0004}\'')
    add("--sync-every", type=int, default=500, help="inner steps in a round (default 500)")
    add("--outer-rounds", type=int, default=100, help="rounds (default 100)")
    add("--outer-lr", type=float, default=0.7, help="outer learning rate (default 0.7)")
    add("--outer-momentum", type=float, default=0.9, help="outer momentum (default 0.9)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one replica; returns the exit code."""
    args = _parser().parse_intermixed_args(arguments)
    if args.stop_with_launcher:
        stop_with_launcher()
    try:
        identity, uri, recipe, folder = _settings(args)
    except (ReplicationError, ValueError) as error:
        return _fail(f"replica {args.replica_id}" if args.replica_id is not None else "replica", Exit.SETTINGS, error)
    return run(recipe, identity, uri, folder)


def run(recipe: Any, identity: Identity, uri: str, folder: Path) -> int:
    """Train a checked recipe's replica in this process; returns the exit code."""
    who = f"replica {identity.replica}"
    try:
        result = train(recipe, identity, uri, folder)
    except (ReplicationError, ImportError) as error:
        return _fail(who, exit_code(error), error)
    except SystemExit as ended:
        print(f"{who}: stopped", flush=True)
        return ended.code if isinstance(ended.code, int) else Exit.ERROR
    except Exception as error:
        traceback.print_exc()
        return _fail(who, Exit.ERROR, error)
    shown = {k: result[k] for k in ("rounds", "steps", "loss", "validation_loss", "digest") if k in result}
    print(f"{who}: completed  {json.dumps(shown)}", flush=True)
    return Exit.COMPLETED


def train(recipe: Any, identity: Identity, uri: str, folder: Path) -> dict[str, Any]:
    """Train a checked recipe's replica in this process; returns its result, or raises why there is none."""
    # For the recipe's own classes: `shard_iterable(dataset)` and the like read it there.
    os.environ[REPLICA], os.environ[REPLICAS] = str(identity.replica), str(identity.replicas)
    if recipe.training.threads is not None:
        import torch

        torch.set_num_threads(recipe.training.threads)
    # Here, not above: importing a trainer takes seconds, and only one of them need be installed.
    trainer = import_module(f"composer_replication.diloco.serverless.{recipe.trainer}_replica")
    print(
        f"replica {identity.replica} of {identity.replicas} on {platform.node()}, process {os.getpid()}: "
        f"composer-replication {__version__}, Python {platform.python_version()}, {trainer.versions()}",
        flush=True,
    )
    _check_store(uri, recipe.store.control)
    print(f"store {uri}: ok", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    if said := _set_aside(recipe, identity, uri, folder):
        print(said, flush=True)
    return trainer.train(recipe, identity, uri, folder)


def exit_code(error: BaseException) -> Exit:
    """What the way a replica failed says about starting it again."""
    table: list[tuple[tuple[type[BaseException], ...], Exit]] = [
        ((Fenced,), Exit.FENCED),
        ((ReplicaTaken,), Exit.TAKEN),
        ((RoundAborted,), Exit.ABORTED),
        ((Diverged,), Exit.DIVERGED),
        ((Interrupted,), Exit.PREEMPTED),
        ((StoreError, RoundError), Exit.STORE),  # no answer in time: the store's failure as far as one can tell
        ((FleetError, RecipeError, ImportError), Exit.SETTINGS),
    ]
    return next((code for kinds, code in table if isinstance(error, kinds)), Exit.ERROR)


def stop_with_launcher() -> None:
    """Ask this process to stop as soon as standard input ends: its launcher is gone."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def settings(arguments: Sequence[str]) -> tuple[Identity, str, Any, Path]:
    """(identity, the store's URI, recipe, folder) that these arguments say. Raises RecipeError, ValueError."""
    return _settings(_parser().parse_intermixed_args(arguments))


def _settings(args: argparse.Namespace) -> tuple[Identity, str, Any, Path]:
    from composer_replication.recipe import load_recipe

    recipe = load_recipe(args.recipe, args.overrides) if args.recipe else _by_hand(args)
    if recipe.trainer == "composer" and args.launcher in (*_WORLDS, "auto"):
        # Before Composer is imported: it would train in the launcher's world, which spans the fleet.
        isolate_world(launcher=None if args.launcher == "auto" else args.launcher)
    replicas = args.num_replicas
    if replicas is None and args.recipe and not os.environ.get(REPLICAS) and not args.launcher:
        replicas = recipe.fleet.replicas
    identity = read_identity(replica=args.replica_id, replicas=replicas, launcher=args.launcher)
    if args.recipe and identity.replicas != recipe.fleet.replicas:
        raise RecipeError(
            f"the recipe is for a fleet of {recipe.fleet.replicas} (fleet.replicas), but this process is told of "
            f"{identity.replicas}: add fleet.replicas={identity.replicas} to every replica's command, or correct it"
        )
    uri = args.rendezvous_uri or os.environ.get(STORE) or recipe.store.uri
    if not uri:
        raise RecipeError(f"no store: give --rendezvous-uri, set {STORE}, or write store.uri into the recipe")
    folder = Path(args.output) if args.output else Path(recipe.folder).expanduser() / f"replica-{identity.replica}"
    return identity, uri, recipe, folder


def _by_hand(args: argparse.Namespace) -> Any:
    """The recipe that the options of a spec without one amount to."""
    from composer_replication.recipe import recipe_from

    try:
        optimizer = json.loads(args.inner_optimizer)
    except ValueError as error:
        raise RecipeError(f"--inner-optimizer must be JSON: {error}") from error
    if not isinstance(optimizer, dict):
        raise RecipeError(f"--inner-optimizer must be a JSON object, not {args.inner_optimizer}")
    own = {key: optimizer.pop(key) for key in ("name", "lr", "weight_decay") if key in optimizer}
    model, data, usual = _task(args.model_id, args.overrides)
    values = {
        "name": "by-hand",
        "trainer": args.trainer,
        "model": model,
        "data": data,
        "optimizer": {**usual, **own, "args": optimizer},
        "scheduler": {"name": "constant"},
        "training": {"steps": args.sync_every * args.outer_rounds},
        "autoloco": {
            "policy": "fixed",
            "base_horizon": args.sync_every,
            "outer_lr": args.outer_lr,
            "outer_momentum": args.outer_momentum,
        },
    }
    if args.num_replicas is not None:
        values["fleet"] = {"replicas": args.num_replicas}
    return recipe_from(json.dumps(values), args.overrides)  # JSON is YAML


def _task(model_id: str, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(model, data, usual settings of the optimizer) that a model's name stands for."""
    data: dict[str, Any] = {"name": "text_bytes"}
    own_folder = (Path(model_id) / "config.json").is_file()
    if model_id in MODELS or not own_folder and "/" not in model_id:
        built_in = "." not in model_id and ":" not in model_id
        return {"name" if built_in else "class": model_id}, data, {}
    data = {"name": "text_lm", "args": {"tokenizer": model_id}}
    if os.environ.get(DATA_URI):
        data["args"]["uri"] = os.environ[DATA_URI]
    elif not any(one.startswith(("data.args.uri=", "data.class=", "data.name=")) for one in overrides):
        raise RecipeError(
            f"{model_id} needs text to train on: set {DATA_URI} in the replica's environment (a spec's extra_env), or "
            "add data.args.uri=..., to a file or a folder of .txt, .jsonl or .parquet files, such as s3://bucket/text"
        )
    return {"name": "causal_lm", "args": {"path": model_id, "dtype": "bfloat16"}}, data, {"name": "adamw", "lr": 4e-4}


def _set_aside(recipe: Any, identity: Identity, uri: str, folder: Path) -> str:
    """A replica that was away for long joins, rather than stop for a checkpoint of its own that is too old."""
    from composer_replication.collective.object_store.place import open_run
    from composer_replication.diloco.serverless.own_checkpoints import set_aside_behind
    from composer_replication.diloco.serverless.replica import CHECKPOINTS

    try:
        run = open_run(uri, control=recipe.store.control, signing_key=recipe.store.signing_key_file)
    except (ReplicationError, ValueError):
        return ""  # told when the replica starts
    return set_aside_behind(run, folder / CHECKPOINTS, identity.replica)


def _check_store(uri: str, control: str | None) -> None:
    from composer_replication.store import open_store

    for name, place in (("store.uri", uri), ("store.control", control)):
        try:
            store = open_store(place) if place else None
        except ValueError as error:
            raise RecipeError(f"{name}: {error}") from error
        if store is not None:
            check_writable(store)


def check_writable(store: ObjectStore) -> None:
    """Write an object, read it back and remove it. Raises StoreError."""
    key, data = f"probes/{uuid.uuid4().hex}", b"is this store fit to be written?"
    store.put(key, data)
    try:
        if store.get(key) != data:
            raise StoreError(f"{store.uri} doesn't give back what was written to it ({key})")
    finally:
        store.delete([key])


def _fail(who: str, code: Exit, error: BaseException) -> int:
    kind = "" if isinstance(error, RecipeError) else f"{type(error).__name__}: "
    print(f"{who}: {kind}{error}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
