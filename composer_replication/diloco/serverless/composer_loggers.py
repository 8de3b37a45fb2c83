"""The loggers of a recipe under Composer: its logger destinations, one run for each replica, grouped by fleet.

Invariant: as under Lightning (`lightning_loggers.py`); names, groups and tags are the same.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from pathlib import Path

from composer.core import State
from composer.loggers import Logger, LoggerDestination, MLFlowLogger, TensorboardLogger, WandBLogger

from composer_replication.composer.csv_logger import CSVLogger
from composer_replication.diloco.serverless.loggers import LoggedRun, check_loggers, ensure_experiment, line_up
from composer_replication.isolate import Identity
from composer_replication.recipe import Recipe

__all__ = ["make_loggers"]


def make_loggers(
    recipe: Recipe, identity: Identity, folder: Path, skipped: Callable[[], int]
) -> list[LoggerDestination]:
    """`skipped`: inner steps of the fleet that this replica never took. Raises RecipeError if one can't be had."""
    check_loggers(recipe)
    run = LoggedRun.of(recipe, identity, folder)
    return [line_up(_MAKERS[name](run, recipe), skipped) for name in recipe.logging.loggers]


class _WandB(WandBLogger):
    """Composer's, but for how it begins: version 0.32 asks the run for what W&B's newer releases don't have."""

    def init(self, state: State, logger: Logger) -> None:
        if self._enabled:
            import wandb

            run = wandb.init(**self._init_kwargs)
            self.entity, self.project, self.run_dir, self.run_url = run.entity, run.project, run.dir, run.url
            atexit.register(self._set_is_in_atexit)  # W&B ends its runs at the exit by itself


def _csv(run: LoggedRun, recipe: Recipe) -> LoggerDestination:
    return CSVLogger(run.folder / "csv" / "metrics.csv")


def _tensorboard(run: LoggedRun, recipe: Recipe) -> LoggerDestination:
    return TensorboardLogger(log_dir=str(run.folder / "tensorboard"), flush_interval=recipe.training.log_every)


def _wandb(run: LoggedRun, recipe: Recipe) -> LoggerDestination:
    return _WandB(
        project=run.project,
        group=run.group,
        name=run.name,
        entity=recipe.logging.entity,
        tags=[f"{name}={value}" for name, value in recipe.logging.tags.items()],
        init_kwargs={
            "job_type": "replica",
            "id": run.id_of("wandb"),
            "resume": "allow",
            "dir": str(run.folder),
        },
    )


def _mlflow(run: LoggedRun, recipe: Recipe) -> LoggerDestination:
    ensure_experiment(run)
    again = run.remembered("mlflow") is not None
    run.remember("mlflow", run.name)
    return MLFlowLogger(
        experiment_name=run.project,
        run_name=run.name,
        tags=dict(run.tags),
        tracking_uri=run.tracking_uri,
        run_group=run.group,
        log_system_metrics=False,
        synchronous=True,
        log_duplicated_metric_every_n_steps=1,  # a horizon that stays is a horizon
        resume=again,  # finds the newest run of this replica's name
    )


_MAKERS: Mapping[str, Callable[[LoggedRun, Recipe], LoggerDestination]] = {
    "csv": _csv,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}
