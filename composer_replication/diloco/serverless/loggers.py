"""The loggers of a recipe, whichever trainer it names: what they are called, and that they can be had.

Invariant: all replicas of a fleet log under one group and against the fleet's inner steps, so that their curves lie on
one another. Nothing here holds or reads a key: each logger's own library finds its own in the environment.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from composer_replication.diloco.serverless.locks import locked
from composer_replication.drafts import written_whole
from composer_replication.errors import RecipeError
from composer_replication.isolate import Identity
from composer_replication.recipe import Recipe

__all__ = ["LoggedRun", "check_loggers", "ensure_experiment", "line_up", "logged_settings"]

# Of each module, what pip installs.
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny (or mlflow)"}
_REMEMBERED = "loggers.json"
_TRACKING = "MLFLOW_TRACKING_URI"
_SERVERS = {"databricks", "databricks-uc", "uc"}  # written like a folder
_WAIT_SECONDS = 60.0


def check_loggers(recipe: Recipe) -> None:
    """Raise RecipeError for a logger whose library isn't in this environment, or that has no place to log to."""
    for name in recipe.logging.loggers:
        if name in _PACKAGES and find_spec(name) is None:
            raise RecipeError(
                f"logging.loggers: {name} isn't installed where this replica runs: pip install "
                f"{_PACKAGES[name]}, or leave it out"
            )
    if "mlflow" in recipe.logging.loggers and not (recipe.logging.tracking_uri or os.environ.get(_TRACKING)):
        raise RecipeError(
            "logging.tracking_uri: say where MLflow is (http://host:5000, sqlite:////shared/mlflow.db), or set "
            f"{_TRACKING} where the replicas run"
        )


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """What one replica's loggers are told of the run."""

    group: str  # of all replicas of the run
    name: str
    folder: Path  # the replica's own
    project: str
    tags: Mapping[str, str]
    tracking_uri: str

    @staticmethod
    def of(recipe: Recipe, identity: Identity, folder: Path) -> LoggedRun:
        section = recipe.logging
        group = section.group or recipe.name
        return LoggedRun(
            group=group,
            name=f"{group}-r{identity.replica}",
            folder=folder,
            project=section.project or "composer-replication",
            tags={
                "composer_replication.run": group,
                "composer_replication.replica": str(identity.replica),
                **section.tags,
            },
            tracking_uri=section.tracking_uri or os.environ.get(_TRACKING, ""),
        )

    def remembered(self, logger: str) -> str | None:
        """The id under which an earlier process of this replica logged; None if it is the first one here."""
        return _read(self.folder / _REMEMBERED).get(logger)

    def remember(self, logger: str, value: str) -> str:
        """Keep the id for the process that may come after this one."""
        path = self.folder / _REMEMBERED
        with written_whole(path) as draft:
            draft.write_text(json.dumps({**_read(path), logger: value}), encoding="utf-8")
        return value

    def id_of(self, logger: str) -> str:
        """That id, made now if there is none."""
        return self.remembered(logger) or self.remember(logger, uuid.uuid4().hex[:16])


def ensure_experiment(run: LoggedRun) -> None:
    """Make MLflow's experiment unless it is there. The trainers' loggers look for it and then make it, and replicas
    that start together would make it twice: a server refuses the second, and the second replica would fail."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    with _one_at_a_time(run.tracking_uri):
        client = MlflowClient(run.tracking_uri)
        if client.get_experiment_by_name(run.project) is None:
            try:
                client.create_experiment(run.project)
            except MlflowException:
                if client.get_experiment_by_name(run.project) is None:
                    raise


def _one_at_a_time(tracking_uri: str) -> AbstractContextManager[Any]:
    """Files have no server that would put their users in order."""
    where = urlsplit(tracking_uri)
    if where.scheme not in ("", "file", "sqlite") or tracking_uri in _SERVERS:
        return nullcontext()
    path = Path(url2pathname(where.path.removeprefix("/") if where.scheme == "sqlite" else where.path))
    path.parent.mkdir(parents=True, exist_ok=True)
    # Who waits in vain goes on: the experiment is looked for once more.
    return locked(path.with_name(f".{path.name}.lock"), wait_seconds=_WAIT_SECONDS)


def logged_settings(recipe: Recipe, identity: Identity) -> dict[str, Any]:
    """What runs are told apart by."""
    return {
        "replica": identity.replica,
        "replicas": identity.replicas,
        "trainer": recipe.trainer,
        "steps": recipe.training.steps,
        "seed": recipe.training.seed,
        "policy": recipe.autoloco.policy,
        "base_horizon": recipe.autoloco.base_horizon,
        "codec": recipe.codec,
    }


def line_up(logger: Any, skipped: Callable[[], int]) -> Any:
    """Let a logger of either trainer count the fleet's inner steps: its replica's own, and those that it never took.

    `skipped` says how many those are. They are none unless the replica came late, or missed a round.
    """
    own = logger.log_metrics

    def log_metrics(metrics: Mapping[str, Any], step: int | None = None) -> None:
        own(metrics, step=step if step is None else step + skipped())

    logger.log_metrics = log_metrics
    return logger


def _read(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
