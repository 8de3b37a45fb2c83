"""The loggers of a recipe under Lightning: Lightning's own, one run for each replica, grouped by fleet.

Invariant: a replica that is started again goes on with the W&B and MLflow runs that it had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from composer_replication.diloco.serverless.loggers import (
    LoggedRun,
    check_loggers,
    ensure_experiment,
    line_up,
    logged_settings,
)
from composer_replication.isolate import Identity
from composer_replication.recipe import Recipe

__all__ = ["finish", "make_loggers"]


def make_loggers(recipe: Recipe, identity: Identity, folder: Path, skipped: Callable[[], int]) -> list[Logger]:
    """`skipped`: inner steps of the fleet that this replica never took. Raises RecipeError if one can't be had."""
    check_loggers(recipe)
    run = LoggedRun.of(recipe, identity, folder)
    made = [_MAKERS[name](run, recipe) for name in recipe.logging.loggers]
    for logger in made:
        logger.log_hyperparams(logged_settings(recipe, identity))
        line_up(logger, skipped)
    return made


def finish(loggers: list[Logger], metrics: Mapping[str, float], step: int) -> None:
    """Log what the run's final weights measure, and let go: W&B's run would else end with the process."""
    for logger in loggers:
        if metrics:
            logger.log_metrics({f"final/{name}": value for name, value in metrics.items()}, step=step)
        logger.save()
        logger.finalize("success")
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()


def _csv(run: LoggedRun, recipe: Recipe) -> Logger:
    # Lightning begins a new version for each process, and keeps what is there; rows are written as they come.
    return CSVLogger(run.folder, name="csv", flush_logs_every_n_steps=1)


def _tensorboard(run: LoggedRun, recipe: Recipe) -> Logger:
    return TensorBoardLogger(run.folder, name="tensorboard", version="", default_hp_metric=False)


def _wandb(run: LoggedRun, recipe: Recipe) -> Logger:
    return WandbLogger(
        name=run.name,
        save_dir=run.folder,
        id=run.id_of("wandb"),
        project=run.project,
        entity=recipe.logging.entity,
        group=run.group,
        job_type="replica",
        tags=[f"{name}={value}" for name, value in recipe.logging.tags.items()],
    )


def _mlflow(run: LoggedRun, recipe: Recipe) -> Logger:
    ensure_experiment(run)
    logger = MLFlowLogger(
        experiment_name=run.project,
        run_name=run.name,
        tracking_uri=run.tracking_uri,
        tags=dict(run.tags),
        run_id=run.remembered("mlflow"),
    )
    if logger.run_id is not None:  # only rank 0 of a replica has one
        run.remember("mlflow", logger.run_id)
    return logger


_MAKERS: Mapping[str, Callable[[LoggedRun, Recipe], Logger]] = {
    "csv": _csv,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}
