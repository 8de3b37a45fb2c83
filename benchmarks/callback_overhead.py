"""Steps between boundaries, with the Lightning callback and without it, alternated in one process.

    python benchmarks/callback_overhead.py [--pairs 200]

Both trainers run in lock-step, one step of each in turn, on equal models and batches (steps of 50 ms or more), so that
whatever else the machine does falls on both alike. Prints the median of the paired ratios with its 95 % interval (by
order statistics).
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset

from composer_replication.lightning import AutoLoCoCallback


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((128,), index % 250)}


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 256)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(256, 256)

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        ids = batch["input_ids"]
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Turnstile(Callback):
    """Lets one of two threads do one whole step at a time and notes how long each took."""

    def __init__(self, me: int, turn: list[int], gate: threading.Condition) -> None:
        self.me, self.turn, self.gate = me, turn, gate
        self.seconds: list[float] = []
        self.began = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._wait()

    def _wait(self) -> None:
        with self.gate:
            self.gate.wait_for(lambda: self.turn[0] in (self.me, -1))
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        self._pass()
        self._wait()

    def _pass(self) -> None:
        with self.gate:
            self.turn[0] = self.turn[0] if self.turn[0] == -1 else 1 - self.me
            self.gate.notify_all()

    def on_train_end(self, *_: object) -> None:
        with self.gate:
            self.turn[0] = -1
            self.gate.notify_all()


def fit(me: int, steps: int, callbacks: list[Callback], turn: list[int], gate: threading.Condition) -> list[float]:
    torch.manual_seed(0)
    turnstile = Turnstile(me, turn, gate)
    trainer = Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, turnstile],
    )
    trainer.fit(Model(), DataLoader(Tokens(), batch_size=8))
    return turnstile.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    steps = arguments.pairs + 10
    turn, gate, results = [0], threading.Condition(), {}
    with tempfile.TemporaryDirectory() as folder:
        ours = AutoLoCoCallback(
            f"file://{Path(folder) / 'run'}", replica=0, replicas=1, base_horizon=10 * steps, policy="fixed"
        )
        setups: list[list[Callback]] = [[], [ours]]
        threads = [
            threading.Thread(target=lambda i=i: results.__setitem__(i, fit(i, steps, setups[i], turn, gate)))
            for i in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    plain, with_callback = results[0][5:-5], results[1][5:-5]
    ratios = sorted(b / a for a, b in zip(plain, with_callback, strict=True))
    count = len(ratios)
    half = 0.98 * math.sqrt(count)  # 95 % of the binomial that places the median among the order statistics
    low, high = ratios[max(int(count / 2 - half), 0)], ratios[min(int(count / 2 + half), count - 1)]
    print(f"pairs {count}, plain step {1e3 * statistics.median(plain):.1f} ms")
    print(f"with callback / without: median {statistics.median(ratios):.4f}, 95 % interval [{low:.4f}, {high:.4f}]")


if __name__ == "__main__":
    main()
