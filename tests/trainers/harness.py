"""One way to train a small model with either Trainer, for what both must do alike. This is Lightning's part.

A `Core` is what is trained; a `Kind` puts it into its Trainer, with our adapter or without. Hooks are called alike:
`before(number, control)` before each batch (from 0), `after(number, control)` when a batch and its round are done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from composer_replication.collective.in_process import InProcessFleet
from composer_replication.lightning import AutoLoCoCallback
from composer_replication.tasks.text import ResumableLoader
from tests.lightning.helpers import QUIET, Numbered, assert_same_bits, flat, in_threads, weights
from tests.support.cases import Plain

__all__ = [
    "Control",
    "Core",
    "Fitted",
    "Kind",
    "Share",
    "WithLightning",
    "adamw",
    "assert_same_bits",
    "flat",
    "in_threads",
    "sgd",
    "weights",
]

Optimize = Callable[[nn.Module], tuple[Any, Any]]  # the module -> (optimizer, scheduler for every step or None)


class Core(Plain):
    """A small regression. `seen` are the sample ids, batch by batch; `losses` the losses; `validated` the weights."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.seen: list[list[int]] = []
        self.losses: list[float] = []
        self.validated: list[dict[str, Tensor]] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss = super().loss(batch)
        self.seen.append(batch["id"].tolist())
        self.losses.append(loss.item())
        return loss

    def validate(self, batch: dict[str, Tensor]) -> None:
        self.validated.append(weights(self))


def sgd(module: nn.Module, lr: float = 0.05) -> tuple[Any, Any]:
    return torch.optim.SGD(module.parameters(), lr=lr), None


def adamw(module: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.1 * step))


@dataclass(frozen=True)
class Share:
    """A replica's part of numbered samples, in order or shuffled, from a loader that a checkpoint can put back."""

    count: int
    replica: int = 0
    replicas: int = 1
    batch_size: int = 1
    shuffle: bool = False

    def loader(self, batches_in_one: int = 1) -> ResumableLoader:
        samples = Numbered(self.count)
        if self.count == 0:
            return ResumableLoader(samples, batch_size=self.batch_size)
        sampler = DistributedSampler(samples, self.replicas, self.replica, shuffle=self.shuffle)
        return ResumableLoader(samples, batch_size=self.batch_size * batches_in_one, sampler=sampler)


class Control(ABC):
    """What a hook may do to the fit that it is called in."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write the Trainer's own checkpoint."""

    @abstractmethod
    def stop(self) -> None:
        """End the training after this batch, in order."""


Hook = Callable[[int, Any], None]


def nothing(number: int, control: Control) -> None:
    """The hook that does nothing."""


@dataclass
class Fitted:
    """What a fit left behind. `logged`: for each metric its values, in order."""

    core: Any
    ours: Any
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None
    logged: dict[str, list[float]] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, Tensor]:
        return weights(self.core)

    @property
    def steps(self) -> list[int]:
        """Of each round."""
        return [summary.steps for summary in self.ours.rounds]


class Kind(ABC):
    """A Trainer. `adapters` are the classes that may stand in it."""

    name: str
    adapters: tuple[type, ...]

    def adapter(self, store: Any = None, **options: Any) -> Any:
        return self.adapters[0](store, **options)

    def ours(self, collective: Any = None, **options: Any) -> Any:
        """The adapter with a fixed interval of 4, alone unless there is a collective."""
        collective = InProcessFleet(1).collectives()[0] if collective is None else collective
        return self.adapter(collective=collective, **{"policy": "fixed", "base_horizon": 4, **options})

    @abstractmethod
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
        """Train `core` on a Share or a loader, to `steps` or `epochs`. `resume` is a checkpoint that a hook saved."""

    @abstractmethod
    def fits(self, core: Any, data: Any, ours: Any, times: int, between: Callable[[int], None]) -> None:
        """As many epochs of `data` as `times`, each a fit of one Trainer; `between(n)` after each."""


class _Module(pl.LightningModule):
    def __init__(self, core: Any, optimize: Optimize, before: Hook, after: Hook) -> None:
        super().__init__()
        self.core, self._optimize, self._before, self._after = core, optimize, before, after
        self.number = 0
        self.made: tuple[Any, Any] = (None, None)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._before(self.number, _LightningControl(self.trainer))
        self.core.begin(self.number)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.core.loss(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        self.number += 1
        self._after(self.number - 1, _LightningControl(self.trainer))

    def configure_optimizers(self) -> Any:
        self.made = self._optimize(self)
        optimizer, scheduler = self.made
        return optimizer if scheduler is None else ([optimizer], [{"scheduler": scheduler, "interval": "step"}])


class _Validated(_Module):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.core.validate(batch)


class _LightningControl(Control):
    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer = trainer

    def save(self, path: Path) -> None:
        self.trainer.save_checkpoint(path)

    def stop(self) -> None:
        self.trainer.should_stop = True


class _Kept(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, list[float]] = {}

    name, version = "kept", "0"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            if name.startswith("autoloco/"):
                self.values.setdefault(name, []).append(value)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """There are none."""


class WithLightning(Kind):
    name = "lightning"
    adapters = (AutoLoCoCallback,)

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
        made = _Module if validate_every is None else _Validated
        module, kept = made(core, optimize, before, after), _Kept()
        more: dict[str, Any] = {"logger": kept, "log_every_n_steps": 1} if logged else {}
        if scaler:
            own = torch.amp.GradScaler("cpu", init_scale=4.0)
            more["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler=own)]
        if validate_every is not None:
            more |= {"val_check_interval": validate_every, "num_sanity_val_steps": 0}
        if not ours or not isinstance(data, Share):
            more["strategy"] = "auto"  # which shards nothing
        trainer = pl.Trainer(
            callbacks=list(ours),
            max_steps=-1 if steps is None else steps,
            max_epochs=epochs if steps is None else -1,
            accumulate_grad_batches=accumulate,
            **{**QUIET, **more},
        )
        trainer.fit(
            module,
            data.loader() if isinstance(data, Share) else data,
            Share(1).loader() if validate_every is not None else None,
            ckpt_path=resume,
            weights_only=True,
        )
        return Fitted(core, ours[0] if ours else None, *module.made, logged=kept.values)

    def fits(self, core: Any, data: Any, ours: Any, times: int, between: Callable[[int], None]) -> None:
        module = _Module(core, sgd, nothing, nothing)
        trainer = pl.Trainer(callbacks=[ours], max_epochs=1, **QUIET)
        for number in range(times):
            trainer.fit_loop.max_epochs = number + 1
            trainer.fit(module, data.loader())
            between(number)
