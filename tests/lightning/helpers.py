"""Tiny modules, and fleets of threads that train them with real Trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from composer_replication.collective.in_process import InProcessCollective, InProcessFleet
from composer_replication.lightning import AutoLoCoCallback
from tests.support.seeded import seeded

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "strategy": "local_replica",
}


class Numbered(Dataset[dict[str, Tensor]]):
    """Sample i is always the same vector and target, and says that it is i."""

    def __init__(self, count: int, width: int = 6) -> None:
        source = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, width, generator=source)
        self.y = torch.randn(count, 2, generator=source)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"id": torch.tensor(index), "x": self.x[index], "y": self.y[index]}


class Tiny(pl.LightningModule):
    """A small regression. `seen` are the sample ids, batch by batch; `losses` the losses."""

    def __init__(self, *, lr: float = 0.05, seed: int = 0, optimizer: str = "sgd", scheduler: bool = False) -> None:
        super().__init__()
        self.net = seeded(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)), seed)
        self.lr, self.kind, self.scheduler = lr, optimizer, scheduler
        self.seen: list[list[int]] = []
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch["x"]), batch["y"])
        self.seen.append(batch["id"].tolist())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        if self.kind == "sgd":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        if not self.scheduler:
            return optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.1 * step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def loader(count: int, *, batch_size: int = 1, **more: Any) -> DataLoader[Any]:
    return DataLoader(Numbered(count), batch_size=batch_size, **more)


def trainer(*callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
    return pl.Trainer(callbacks=list(callbacks), **{**QUIET, **settings})


def in_threads(replicas: int, work: Callable[[int, InProcessCollective], Any], **fleet: Any) -> list[Any]:
    """Run `work(replica, collective)` in one thread a replica; the results, or the first replica's error."""
    collectives = InProcessFleet(replicas, timeout_seconds=60, **fleet).collectives()
    with ThreadPoolExecutor(replicas) as pool:
        futures = [pool.submit(work, replica, collectives[replica]) for replica in range(replicas)]
        errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error
    return [future.result() for future in futures]


def callback(collective: Any, **options: Any) -> AutoLoCoCallback:
    return AutoLoCoCallback(collective=collective, **{"policy": "fixed", "base_horizon": 4, **options})


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def assert_same_bits(first: dict[str, Tensor], *others: dict[str, Tensor]) -> None:
    for other in others:
        assert first.keys() == other.keys()
        for name in first:
            assert torch.equal(first[name], other[name]), name


def flat(batches: Iterable[Iterable[int]]) -> list[int]:
    return [one for batch in batches for one in batch]
