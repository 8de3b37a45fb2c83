"""Composer's part of the harness."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from composer import Callback, Trainer
from composer.core import Event, Precision, State
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel
from torch import Tensor

from composer_replication.composer import AutoLoCo, AutoLoCoCallback
from tests.composer.helpers import QUIET, At
from tests.trainers.harness import Control, Fitted, Hook, Kind, Optimize, Share, nothing, sgd

__all__ = ["WithComposer"]


class _Model(ComposerModel):
    def __init__(self, core: Any) -> None:
        super().__init__()
        self.core = core

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.core.loss(batch)

    def loss(self, outputs: Tensor, batch: Any, *_: Any, **__: Any) -> Tensor:
        return outputs

    def eval_forward(self, batch: dict[str, Tensor], outputs: Any = None) -> Tensor:
        self.core.validate(batch)
        return batch["x"]

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        """There is none."""


class _Control(Control):
    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def save(self, path: Path) -> None:
        self.trainer.save_checkpoint(str(path))

    def stop(self) -> None:
        self.trainer.state.stop_training()


class _After(Callback):
    def __init__(self, hook: Hook) -> None:
        self.hook, self.number = hook, 0
        self.control: _Control | None = None

    def batch_end(self, state: State, logger: Any) -> None:
        self.number += 1
        assert self.control is not None
        self.hook(self.number - 1, self.control)


class WithComposer(Kind):
    name = "composer"
    adapters = (AutoLoCo, AutoLoCoCallback)

    def adapter(self, store: Any = None, **options: Any) -> Any:
        # Schedulers of torch's, for every step: as `fit` gives them to the Trainer.
        return AutoLoCo(store, **{"step_schedulers_every_batch": True, **options})

    def fit(
        self,
        core: Any,
        data: Any,
        *ours: Any,
        optimize: Optimize = sgd,
        steps: int | None = None,
        epochs: int = 1,
        accumulate: int = 1,
        before: Hook = nothing,
        after: Hook = nothing,
        validate_every: int | None = None,
        scaler: bool = False,
        logged: bool = False,
        resume: Path | None = None,
    ) -> Fitted:
        model, hook, kept = _Model(core), _After(after), InMemoryLogger()
        optimizer, scheduler = optimize(model)
        number = [0]

        def begins(state: State) -> None:
            before(number[0], _Control(trainer))
            core.begin(number[0])
            number[0] += 1

        more: dict[str, Any] = {}
        if accumulate > 1:
            more["device_train_microbatch_size"] = data.batch_size
        if scheduler is not None:
            more |= {"schedulers": scheduler, "step_schedulers_every_batch": True}
        if validate_every is not None:
            more |= {"eval_dataloader": Share(1).loader(), "eval_interval": f"{validate_every}ba"}
        if resume is not None:
            more |= {"load_path": str(resume), "load_progress_bar": False}
        trainer = Trainer(
            model=model,
            train_dataloader=data.loader(accumulate) if isinstance(data, Share) else data,
            algorithms=[*ours, At(Event.BATCH_START, begins)],
            callbacks=[hook],
            loggers=[kept] if logged else None,
            optimizers=optimizer,
            max_duration=f"{epochs}ep" if steps is None else f"{steps}ba",
            **QUIET,
            **more,
        )
        hook.control = _Control(trainer)
        if scaler:  # Composer offers fp16 on GPUs only: the same path, with a scaler that works here
            trainer.state.precision = Precision.AMP_FP16
            trainer.state.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        try:
            trainer.fit()
        finally:
            trainer.close()
        values = {name: [value for _, value in pairs] for name, pairs in kept.data.items() if "autoloco/" in name}
        return Fitted(core, ours[0] if ours else None, optimizer, scheduler, logged=values)

    def fits(self, core: Any, data: Any, ours: Any, times: int, between: Callable[[int], None]) -> None:
        model = _Model(core)
        trainer = Trainer(
            model=model,
            train_dataloader=data.loader(),
            algorithms=[ours],
            optimizers=sgd(model)[0],
            **QUIET,
        )
        try:
            for number in range(times):
                trainer.fit(duration="1ep")
                between(number)
        finally:
            trainer.close()
