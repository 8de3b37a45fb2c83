"""A user's script for Composer, with AutoLoCo in it: `user_script.py OUT BATCHES`. Every process of a replica runs it.

While there is a file OUT/hold it stands still before batch 5, and says so, for a test to stop it there.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from composer import Callback, Trainer
from composer.core import State
from composer.models import ComposerModel
from composer.optim import LinearScheduler
from composer.utils import dist
from composer.utils.reproducibility import seed_all
from torch.utils.data import DataLoader, TensorDataset

from composer_replication.composer import AutoLoCo, replica_sampler
from composer_replication.isolate import read_identity

__all__ = ["main"]


class Model(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            *(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Dropout(0.2), torch.nn.Linear(5, 2))
        )

    def forward(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(outputs, batch[1])


class Journal(Callback):
    def __init__(self, out: Path) -> None:
        self.out = out
        self.weights: list[str] = []
        self.samples: list[float] = []

    def batch_start(self, state: State, logger: Any) -> None:
        if state.timestamp.batch == 5 and (self.out / "hold").exists():
            (self.out / f"holding-{state.run_name}-{dist.get_global_rank()}").touch()
            while (self.out / "hold").exists():
                time.sleep(0.02)

    def batch_end(self, state: State, logger: Any) -> None:
        self.samples += state.batch[0][:, 0].tolist()
        data = b"".join(parameter.detach().numpy().tobytes() for parameter in state.model.parameters())
        self.weights.append(hashlib.sha256(data).hexdigest())


def main(out: Path, batches: int) -> dict[str, Any]:
    seed_all(7 + read_identity().replica)  # torch begins with any seed otherwise; each replica with weights of its own
    source = torch.Generator().manual_seed(7)
    dataset = TensorDataset(torch.randn(64, 6, generator=source), torch.randn(64, 2, generator=source))
    model, journal = Model(), Journal(out)
    autoloco = AutoLoCo(out.as_uri() + "/store", policy="fixed", base_horizon=3)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(dataset, batch_size=2, sampler=replica_sampler(dataset, shuffle=True)),
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.05),
        schedulers=LinearScheduler(t_max=f"{batches}ba"),
        algorithms=[autoloco],
        callbacks=[journal],
        max_duration=f"{batches}ba",
        save_folder=str(out / "{run_name}"),
        save_interval="4ba",
        autoresume=True,
        device="cpu",
        progress_bar=False,
        seed=5,  # of dropout
    )
    trainer.fit()
    trainer.close()
    assert autoloco.final is not None
    return {
        "weights": journal.weights,
        "samples": journal.samples,
        "digest": autoloco.final.digest,
        "rounds": [[one.round, one.steps, list(one.members)] for one in autoloco.rounds],
        "replica": autoloco.identity.replica,
        "run_name": trainer.state.run_name,
        "world": [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")],
        "group": torch.distributed.is_initialized(),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    result = main(folder, int(sys.argv[2]))
    (folder / f"replica-{result['replica']}-rank-{result['world'][0]}.json").write_text(json.dumps(result))
