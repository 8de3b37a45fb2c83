"""One replica of a recipe, trained by Lightning. Needs `lightning`.

Invariant: what is trained is a function of the recipe and of (replica, replicas) alone. A replica that is started again
finds its own newest checkpoint and goes on from there.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything

from composer_replication.diloco.serverless.components import (
    build_data,
    build_model,
    optimizer_maker,
    scheduler_maker,
)
from composer_replication.errors import RecipeError
from composer_replication.isolate import Identity
from composer_replication.lightning import AutoLoCoCallback, latest_checkpoint
from composer_replication.recipe import Recipe, outer_config, policy_of
from composer_replication.tasks.language_module import LanguageModule

__all__ = ["train"]

RESULT_FILE = "result.json"
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
    settings = recipe.training
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # no advertisements in the log
    seed_everything(settings.seed, workers=True, verbose=False)
    module, loaders, validation = _module(recipe), *_loaders(build_data(recipe))
    rounds = _callback(recipe, identity, uri, folder)
    journal = _Journal(rounds, identity, folder, settings.log_every)
    trainer = _trainer(recipe, folder, [rounds, journal])
    checkpoint = latest_checkpoint(folder / "checkpoints", identity.replica)
    print(f"goes on from {checkpoint}" if checkpoint else "starts from the beginning", flush=True)
    # Our checkpoints hold tensors and plain values only; where Lightning lets us say so, nothing else is loaded.
    safe: dict[str, Any] = {"weights_only": True} if "weights_only" in inspect.signature(trainer.fit).parameters else {}
    trainer.fit(module, **loaders, **(validation or {}), ckpt_path=checkpoint, **safe)
    final = folder / "final.ckpt"
    trainer.save_checkpoint(final, weights_only=True)
    values: dict[str, Any] = {"final_checkpoint_uri": final.absolute().as_uri()}
    if rounds.final is not None:
        values["digest"] = rounds.final.digest
    values.update(_validate(recipe, module, loaders, validation, folder))
    return journal.write(status="completed", **values)


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


def _callback(recipe: Recipe, identity: Identity, uri: str, folder: Path) -> AutoLoCoCallback:
    outer, section, fleet = outer_config(recipe), recipe.autoloco, recipe.fleet
    try:
        return AutoLoCoCallback(
            uri,
            replica=identity.replica,
            replicas=identity.replicas,
            policy=policy_of(recipe),
            outer_lr=outer.lr,
            outer_momentum=outer.momentum if outer.kind == "nesterov" else None,
            outer_kind=outer.kind,
            momentum_min=outer.momentum_min,
            momentum_max=outer.momentum_max,
            max_scale=outer.max_scale,
            normalize=outer.normalize,
            adapt_momentum=outer.adapt_momentum,
            adapt_lr=outer.adapt_lr,
            codec=recipe.codec,
            replica_failure_policy="skip" if fleet.failure_policy == "skip" else "strict",
            min_replicas=fleet.min_replicas,
            timeout=fleet.timeout_seconds,
            start_timeout=fleet.start_timeout_seconds,
            outer_device=section.outer_device,
            weighting="tokens" if section.weighting == "tokens" else "equal",
            buffers="local" if section.buffers == "local" else "average",
            validate_with="shared" if section.validate_with == "shared" else "local",
            checkpoint_dir=folder / "checkpoints",
            checkpoint_every_rounds=fleet.checkpoint_every_rounds,
            checkpoint_every=fleet.shared_checkpoint_every_rounds,
        )
    except ValueError as error:
        raise RecipeError(f"the recipe's settings: {error}") from error


def _trainer(recipe: Recipe, folder: Path, callbacks: list[Callback]) -> Trainer:
    settings = recipe.training
    for name in settings.trainer_args:
        if name in _OURS:
            raise RecipeError(f"training.trainer_args.{name}: set by other keys of the recipe")
    arguments: dict[str, Any] = {
        "logger": False,
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


class _Journal(Callback):
    """Lines for the log, and running totals that outlive a restart. Listed after the AutoLoCoCallback."""

    def __init__(self, rounds: AutoLoCoCallback, identity: Identity, folder: Path, log_every: int) -> None:
        self.rounds = rounds
        self.identity = identity
        self.path = folder / RESULT_FILE
        self.log_every = log_every
        self.values: dict[str, Any] = {"status": "running"}
        self._before = _read(self.path)  # of the processes before this one
        self._seen = 0
        self._began = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if step % self.log_every == 0 and not trainer.fit_loop._should_accumulate():
            loss = trainer.callback_metrics.get("loss")
            print(f"step {step}" + (f"  loss {float(loss):.4f}" if loss is not None else ""), flush=True)
        self._tell()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tell()

    def _tell(self) -> None:
        for closed in self.rounds.rounds[self._seen :]:
            loss = closed.member_metrics.get(self.identity.replica, {}).get("loss")
            print(
                f"round {closed.round}: {closed.steps} steps, fleet at {closed.position}"
                + (f", loss {loss:.4f}" if loss is not None else "")
                + f", replicas {list(closed.members)}, waited {closed.wait_seconds:.2f} s"
                + f", next {closed.next_plan.steps} steps"
                + (f" ({closed.assessment}: {closed.action})" if closed.assessment else "")
                + "".join(f"; without replica {r}: {why}" for r, why in closed.absent.items()),
                flush=True,
            )
        if len(self.rounds.rounds) > self._seen:
            self._seen = len(self.rounds.rounds)
            self.write()

    def write(self, **values: Any) -> dict[str, Any]:
        """Put the totals, and these values, on the disk."""
        closed = self.rounds.rounds
        sums = {
            "wait_seconds": sum(r.wait_seconds for r in closed),
            "exchange_seconds": sum(r.exchange_seconds for r in closed),
            "bytes_sent": sum(r.bytes_sent for r in closed),
            "bytes_received": sum(r.bytes_received for r in closed),
            "seconds": time.monotonic() - self._began,
        }
        self.values |= {name: value + self._before.get(name, 0) for name, value in sums.items()}
        if closed:
            self.values |= {"rounds": closed[-1].round + 1, "steps": closed[-1].position}
            loss = closed[-1].member_metrics.get(self.identity.replica, {}).get("loss")
            if loss is not None:
                self.values["loss"] = loss
        self.values |= {"replica": self.identity.replica, **values}
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        draft.write_text(json.dumps(self.values, indent=1), encoding="utf-8")
        os.replace(draft, self.path)
        return dict(self.values)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def versions() -> str:
    import lightning

    return f"torch {torch.__version__}, lightning {lightning.__version__}"
