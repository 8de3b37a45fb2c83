"""Small models for Composer, and Trainers that say nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from composer import Trainer
from composer.core import Algorithm, Event, State
from composer.models import ComposerModel
from torch import Tensor, nn
from torch.utils.data import DataLoader

from composer_replication.composer import AutoLoCo, replica_sampler
from tests.lightning.helpers import Numbered, Tiny, assert_same_bits, in_threads, weights

__all__ = ["At", "Regression", "algorithm", "assert_same_bits", "data", "in_threads", "train", "trainer", "weights"]

QUIET: dict[str, Any] = {"device": "cpu", "progress_bar": False, "auto_log_hparams": False}


class Regression(ComposerModel):
    """The Lightning tests' small regression, with the same weights for the same seed. `seen` are the sample ids."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = Tiny(seed=seed).net
        self.seen: list[list[int]] = []

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        if self.training:
            self.seen.append(batch["id"].tolist())
        return self.net(batch["x"])

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(outputs, batch["y"])

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {}

    def eval_forward(self, batch: Any, outputs: Any = None) -> Tensor:
        return self.net(batch["x"])

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        """There is none."""


class At(Algorithm):
    """Calls a function with the state at one event."""

    def __init__(self, event: Event, function: Callable[[State], None]) -> None:
        self.event, self.function = event, function

    def match(self, event: Event, state: State) -> bool:
        return event == self.event

    def apply(self, event: Event, state: State, logger: Any) -> None:
        self.function(state)


def algorithm(collective: Any, **options: Any) -> AutoLoCo:
    return AutoLoCo(collective=collective, **{"policy": "fixed", "base_horizon": 4, **options})


def data(count: int, replica: int = 0, replicas: int = 1, *, batch_size: int = 1) -> DataLoader[Any]:
    sampler = replica_sampler(Numbered(count), replica=replica, replicas=replicas)
    return DataLoader(Numbered(count), batch_size=batch_size, sampler=sampler)


def trainer(model: ComposerModel, loader: Any, *algorithms: Algorithm, lr: float = 0.05, **settings: Any) -> Trainer:
    if "optimizers" not in settings:
        settings["optimizers"] = torch.optim.SGD(model.parameters(), lr=lr)
    return Trainer(model=model, train_dataloader=loader, algorithms=list(algorithms), **{**QUIET, **settings})


def train(model: ComposerModel, loader: Any, *algorithms: Algorithm, **settings: Any) -> Trainer:
    made = trainer(model, loader, *algorithms, **settings)
    made.fit()
    made.close()
    return made
