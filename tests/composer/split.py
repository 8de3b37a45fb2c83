"""What each process of replicas of two ranks runs under Composer: a user's script, `split.py OUT BATCHES`."""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from composer import Callback, Trainer
from composer.core import State
from composer.models import ComposerModel
from composer.optim import LinearScheduler
from composer.utils import dist
from torch.utils.data import DataLoader, TensorDataset

from composer_replication.composer import AutoLoCo, replica_sampler
from composer_replication.isolate import isolate_world

__all__ = ["train"]


class Model(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(outputs, batch[1])


class Journal(Callback):
    def __init__(self) -> None:
        self.weights: list[str] = []
        self.samples: list[float] = []

    def batch_end(self, state: State, logger: Any) -> None:
        self.samples += state.batch[0][:, 0].tolist()
        data = b"".join(p.detach().numpy().tobytes() for p in state.model.parameters())
        self.weights.append(hashlib.sha256(data).hexdigest())


def train(rank: int, out: Path, batches: int) -> dict[str, Any]:
    """One process of two replicas of two ranks."""
    warnings.simplefilter("ignore")
    out.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    identity = isolate_world(2)
    torch.manual_seed(identity.replica)
    source = torch.Generator().manual_seed(7)
    dataset = TensorDataset(torch.randn(64, 6, generator=source), torch.randn(64, 2, generator=source))
    model, journal, autoloco = Model(), Journal(), AutoLoCo((out / "store").as_uri(), policy="fixed", base_horizon=3)
    folder = out / f"replica-{identity.replica}"
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(dataset, batch_size=2, sampler=replica_sampler(dataset, shuffle=True)),
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.05),
        schedulers=LinearScheduler(t_max=f"{batches}ba"),
        algorithms=[autoloco],
        callbacks=[journal],
        max_duration=f"{batches}ba",
        save_folder=str(folder),
        save_interval="2ba",
        save_overwrite=True,
        device="cpu",
        progress_bar=False,
        auto_log_hparams=False,
        seed=5,
    )
    trainer.fit()
    trainer.close()
    assert autoloco.final is not None
    return {
        "world": (dist.get_global_rank(), dist.get_world_size()),
        "replica": identity.replica,
        "weights": journal.weights,
        "samples": journal.samples,
        "digest": autoloco.final.digest,
        "rounds": [[one.round, one.steps, list(one.members)] for one in autoloco.rounds],
    }


if __name__ == "__main__":
    result = train(0, Path(sys.argv[1]), int(sys.argv[2]))
    name = f"replica-{result['replica']}-rank-{result['world'][0]}.json"
    (Path(sys.argv[1]) / name).write_text(json.dumps(result))
