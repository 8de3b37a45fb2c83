"""One replica of a recipe, trained by Lightning. Needs `lightning`.

Invariant: what is trained is a function of the recipe and of (replica, replicas) alone. A replica that is started again
finds its own newest checkpoint and goes on from there.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import Logger

from composer_replication.diloco.serverless.components import (
    build_data,
    build_model,
    optimizer_maker,
    scheduler_maker,
)
from composer_replication.diloco.serverless.lightning_loggers import finish, make_loggers
from composer_replication.diloco.serverless.replica import FINAL, Journal, set_out
from composer_replication.errors import RecipeError
from composer_replication.isolate import Identity
from composer_replication.lightning import AutoLoCoCallback
from composer_replication.recipe import Recipe
from composer_replication.tasks.language_module import LanguageModule

__all__ = ["train", "versions"]

_OURS = {
    "strategy",
    "callbacks",
    "max_steps",
    "max_epochs",
    "precision",
    "accumulate_grad_batches",
    "accelerator",
    "devices",
}


def train(recipe: Recipe, identity: Identity, uri: str, folder: Path) -> dict[str, Any]:
    """Train to the end of the recipe; returns the result, which is also written to `folder`/result.json.

    Raises RecipeError before anything is trained if the recipe can't be used, and whatever the fleet's rounds raise.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # no advertisements in the log
    # That of a stream is only to say that it doesn't end.
    warnings.filterwarnings("ignore", "Your `IterableDataset` has `__len__` defined", UserWarning)
    seed_everything(recipe.training.seed, workers=True, verbose=False)
    module, loaders, validation = _module(recipe), *_loaders(build_data(recipe))
    rounds, journal, checkpoint = set_out(AutoLoCoCallback, recipe, identity, uri, folder)
    loggers = make_loggers(recipe, identity, folder, lambda: rounds.skipped) if recipe.logging.loggers else []
    trainer = _trainer(recipe, folder, [rounds, _Logged(journal)], loggers)
    # Our checkpoints hold tensors and plain values only; where Lightning lets us say so, nothing else is loaded.
    safe: dict[str, Any] = {"weights_only": True} if "weights_only" in inspect.signature(trainer.fit).parameters else {}
    trainer.fit(module, **loaders, **(validation or {}), ckpt_path=checkpoint, **safe)
    trainer.save_checkpoint(folder / FINAL, weights_only=True)
    measured = _validate(recipe, module, loaders, validation, folder)
    finish(loggers, measured, trainer.global_step)
    return journal.complete(folder / FINAL, measured)


def _module(recipe: Recipe) -> LightningModule:
    model = build_model(recipe)
    if recipe.model.name is None:
        if not isinstance(model, LightningModule):
            raise RecipeError(
                f"model.class: {recipe.model.class_} gives a {type(model).__name__}, which is no LightningModule "
                "(one from the package 'lightning', not 'pytorch_lightning')"
            )
        return model
    return LanguageModule(model, make_optimizer=optimizer_maker(recipe), make_scheduler=scheduler_maker(recipe))


def _loaders(data: Any) -> tuple[dict[str, Any], Any]:
    """(arguments for `fit`, arguments for a validation at the end or None)."""
    if isinstance(data, LightningDataModule):
        return {"datamodule": data}, {}
    if hasattr(data, "train_dataloader"):
        validation = data.val_dataloader() if hasattr(data, "val_dataloader") else None
        return {"train_dataloaders": data.train_dataloader()}, validation and {"val_dataloaders": validation}
    return {"train_dataloaders": data}, None


def _trainer(recipe: Recipe, folder: Path, callbacks: list[Callback], loggers: list[Logger]) -> Trainer:
    settings = recipe.training
    for name in settings.trainer_args:
        if name in _OURS:
            raise RecipeError(f"training.trainer_args.{name}: set by other keys of the recipe")
    arguments: dict[str, Any] = {
        "logger": loggers or False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
        "log_every_n_steps": settings.log_every,
        "gradient_clip_val": settings.gradient_clip,
    }
    if settings.validate_every is None:
        arguments["limit_val_batches"] = 0
    else:
        arguments |= {
            "val_check_interval": settings.validate_every * settings.accumulate,
            "check_val_every_n_epoch": None,
        }
    try:
        return Trainer(
            strategy="local_replica",
            callbacks=callbacks,
            max_steps=settings.steps,
            max_epochs=-1,
            precision=settings.precision,  # type: ignore[arg-type]  # checked by the Trainer
            accumulate_grad_batches=settings.accumulate,
            accelerator=settings.accelerator,
            devices=settings.devices,
            **{**arguments, **settings.trainer_args},
        )
    except (TypeError, ValueError) as error:
        raise RecipeError(f"training: {error}") from error


def _validate(
    recipe: Recipe, module: LightningModule, loaders: Mapping[str, Any], validation: Any, folder: Path
) -> dict[str, float]:
    """The validation metrics of the fleet's final weights."""
    if validation is None or type(module).validation_step is LightningModule.validation_step:
        return {}
    if "datamodule" in loaders:
        if type(loaders["datamodule"]).val_dataloader is LightningDataModule.val_dataloader:
            return {}
        arguments = {"datamodule": loaders["datamodule"]}
    else:
        arguments = {"dataloaders": validation["val_dataloaders"]}
    trainer = Trainer(
        accelerator=recipe.training.accelerator,
        devices=recipe.training.devices,
        precision=recipe.training.precision,  # type: ignore[arg-type]
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    found = trainer.validate(module, verbose=False, **arguments)
    return {name: float(value) for metrics in found for name, value in metrics.items()}


class _Logged(Callback):
    """Feeds the journal. Listed after the AutoLoCoCallback."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.journal.speaks = trainer.is_global_zero

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if self.journal.due(step) and not trainer.fit_loop._should_accumulate():
            loss = trainer.callback_metrics.get("loss")
            self.journal.step(step, float(loss) if loss is not None else None)
        self.journal.tell()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.journal.tell()


def versions() -> str:
    import lightning

    return f"torch {torch.__version__}, lightning {lightning.__version__}"
