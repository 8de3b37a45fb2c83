"""One replica of a recipe, trained by MosaicML Composer. Needs `composer`.

Invariant: what is trained is a function of the recipe and of (replica, replicas) alone. A replica that is started again
finds its own newest checkpoint and goes on from there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import composer
import torch
from composer import Callback, Trainer
from composer.algorithms import GradientClipping
from composer.core import Algorithm, DataSpec, State
from composer.loggers import LoggerDestination
from composer.models import ComposerModel
from composer.utils import reproducibility
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from composer_replication.composer import AutoLoCo, replica_sampler
from composer_replication.diloco.serverless.components import (
    build_data,
    build_model,
    optimizer_maker,
    scheduler_maker,
)
from composer_replication.diloco.serverless.composer_loggers import make_loggers
from composer_replication.diloco.serverless.loggers import logged_settings
from composer_replication.diloco.serverless.replica import FINAL, Journal, set_out
from composer_replication.drafts import written_whole
from composer_replication.errors import RecipeError
from composer_replication.isolate import Identity
from composer_replication.recipe import Recipe
from composer_replication.tasks.composer_model import LanguageModel
from composer_replication.tasks.streams import StreamLoader

__all__ = ["train", "versions"]

# A recipe's words, which are Lightning's, in Composer's.
_PRECISIONS = {"32-true": "fp32", "32": "fp32", "16-mixed": "amp_fp16", "bf16-mixed": "amp_bf16"}
_DEVICES = {"auto": None, "cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "mps": "mps", "tpu": "tpu"}
_OURS = {
    *("model", "train_dataloader", "eval_dataloader", "max_duration", "algorithms", "callbacks", "optimizers"),
    *("schedulers", "step_schedulers_every_batch", "precision", "device", "device_train_microbatch_size", "seed"),
    *("load_path", "run_name"),
}


def train(recipe: Recipe, identity: Identity, uri: str, folder: Path) -> dict[str, Any]:
    """Train to the end of the recipe; returns the result, which is also written to `folder`/result.json.

    Raises RecipeError before anything is trained if the recipe can't be used, and whatever the fleet's rounds raise.
    """
    settings = recipe.training
    reproducibility.seed_all(settings.seed)
    model, data = _model(recipe), build_data(recipe)
    loader, validation = _training_data(data, recipe, identity), _validation_data(data)
    rounds, journal, checkpoint = set_out(AutoLoCo, recipe, identity, uri, folder, step_schedulers_every_batch=True)
    loggers = make_loggers(recipe, identity, folder, lambda: rounds.skipped) if recipe.logging.loggers else []
    trainer = _trainer(recipe, identity, model, loader, validation, rounds, journal, checkpoint, loggers)
    try:
        if loggers:
            trainer.logger.log_hyperparameters(logged_settings(recipe, identity))
        if trainer.state.max_duration is None or trainer.state.timestamp < trainer.state.max_duration:
            trainer.fit()  # else this run has ended, and it was started again all the same
        _save(trainer.state, folder / FINAL)
        measured = validation is not None and model.get_metrics(is_train=False)
        metrics = _validate(trainer, validation) if measured else {}
    except BaseException as error:
        rounds.close(error)  # Composer doesn't say why it closes
        raise
    finally:
        trainer.close()
    return journal.complete(folder / FINAL, metrics)


def _model(recipe: Recipe) -> ComposerModel:
    model = build_model(recipe)
    if recipe.model.name is None:
        if not isinstance(model, ComposerModel):
            raise RecipeError(
                f"model.class: {recipe.model.class_} gives a {type(model).__name__}, which is no ComposerModel, as "
                "'trainer: composer' needs"
            )
        return model
    return LanguageModel(model)


def _training_data(data: Any, recipe: Recipe, identity: Identity) -> Any:
    """The data's loader, with this replica's share of a map-style dataset and whole batches of an optimizer step."""
    loader = data.train_dataloader() if hasattr(data, "train_dataloader") else data
    if isinstance(loader, DataSpec):
        return loader  # its owner has thought of more than can be taken apart here; `AutoLoCo` looks at it
    own = isinstance(loader, DataLoader) and isinstance(loader.sampler, (RandomSampler, SequentialSampler))
    whole = recipe.training.accumulate
    if isinstance(loader, StreamLoader):
        return loader.larger(whole)
    if not own or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        if whole > 1:
            raise RecipeError(
                "training.accumulate: these data come in batches that can't be made larger here: let the loader give "
                "the whole batch of an optimizer step, and set training.trainer_args.device_train_microbatch_size"
            )
        return loader
    more: dict[str, Any] = {"prefetch_factor": loader.prefetch_factor} if loader.num_workers else {}
    sampler = replica_sampler(
        loader.dataset,
        shuffle=True,
        seed=recipe.training.seed,
        replica=identity.replica,
        replicas=identity.replicas,
    )
    try:
        return type(loader)(
            loader.dataset,
            batch_size=loader.batch_size * whole,
            sampler=sampler,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            drop_last=loader.drop_last,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            persistent_workers=loader.persistent_workers,
            multiprocessing_context=loader.multiprocessing_context,
            **more,
        )
    except TypeError as error:
        raise RecipeError(
            f"data: the loader is a {type(loader).__name__} of its own making, which can't be given this replica's "
            f"share ({error}): use composer_replication.composer.replica_sampler in it"
        ) from error


def _validation_data(data: Any) -> Any:
    return data.val_dataloader() if hasattr(data, "val_dataloader") else None


def _trainer(
    recipe: Recipe,
    identity: Identity,
    model: ComposerModel,
    loader: Any,
    validation: Any,
    rounds: AutoLoCo,
    journal: Journal,
    checkpoint: str | None,
    loggers: list[LoggerDestination],
) -> Trainer:
    settings = recipe.training
    for name in sorted(_OURS.intersection(settings.trainer_args)):
        if name != "device_train_microbatch_size":
            raise RecipeError(f"training.trainer_args.{name}: set by other keys of the recipe")
    if settings.devices != 1:
        raise RecipeError(f"training.devices must be 1 with 'trainer: composer', not {settings.devices}")
    if settings.accelerator not in _DEVICES:
        raise RecipeError(
            f"training.accelerator must be one of {', '.join(_DEVICES)} with 'trainer: composer', "
            f"not {settings.accelerator!r}"
        )
    optimizer = optimizer_maker(recipe)(model)
    algorithms: list[Algorithm] = [rounds]
    if settings.gradient_clip is not None:
        algorithms.append(GradientClipping("norm", settings.gradient_clip))
    arguments: dict[str, Any] = {"progress_bar": False, "auto_log_hparams": False}
    if loggers:
        arguments["loggers"] = loggers
    if settings.validate_every is not None and validation is not None:
        arguments |= {"eval_dataloader": validation, "eval_interval": f"{settings.validate_every}ba"}
    if settings.accumulate > 1:
        arguments["device_train_microbatch_size"] = loader.batch_size // settings.accumulate
    try:
        return Trainer(
            model=model,
            train_dataloader=loader,
            max_duration=f"{settings.steps}ba",
            algorithms=algorithms,
            callbacks=[_Logged(journal)],
            optimizers=optimizer,
            schedulers=scheduler_maker(recipe)(optimizer),
            step_schedulers_every_batch=True,
            precision=_PRECISIONS.get(settings.precision, settings.precision),
            device=_DEVICES[settings.accelerator],
            seed=settings.seed,
            run_name=f"{recipe.name}-replica{identity.replica}",
            load_path=checkpoint,
            load_progress_bar=False,
            **{**arguments, **settings.trainer_args},
        )
    except (TypeError, ValueError) as error:
        raise RecipeError(f"training: {error}") from error


def _save(state: State, path: Path) -> None:
    """The weights alone, where `weights_only=True` loads them: for anybody, and for a Trainer's `load_path`."""
    weights = {name: tensor.detach().cpu() for name, tensor in state.model.state_dict().items()}
    with written_whole(path) as draft:
        torch.save({"state_dict": weights, "state": {"model": weights}}, draft)


def _validate(trainer: Trainer, validation: Any) -> dict[str, float]:
    """The validation metrics of the fleet's final weights."""
    trainer.eval(eval_dataloader=None if trainer.state.evaluators else validation)
    return {
        name: float(metric.compute())
        for metrics in trainer.state.eval_metrics.values()
        for name, metric in metrics.items()
    }


class _Logged(Callback):
    """Feeds the journal."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def batch_end(self, state: State, logger: Any) -> None:
        step = state.timestamp.batch.value
        if self.journal.due(step):
            losses = state.total_loss_dict or {}
            loss = losses.get("loss/train/total")
            self.journal.step(step, float(loss) if loss is not None else None)
        self.journal.tell()

    def fit_end(self, state: State, logger: Any) -> None:
        self.journal.tell()


def versions() -> str:
    return f"torch {torch.__version__}, composer {composer.__version__}"
