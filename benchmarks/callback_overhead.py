"""Steps between boundaries, with our adapter and without it, alternated in one process; for Lightning and Composer.

    python benchmarks/callback_overhead.py [--pairs 200] [--trainer lightning composer]

Two trainers of one kind run in lock-step, one step of each in turn, on equal models and batches (steps of 50 ms or
more), so that whatever else the machine does falls on both alike. Prints the median of the paired ratios with its 95 %
interval (by order statistics).
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

TRAINERS = ("lightning", "composer")


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((128,), index % 250)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 256)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(256, 256)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        ids = batch["input_ids"]
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


class Turnstile:
    """Lets one of two threads do one whole step at a time and notes how long each took."""

    def __init__(self, me: int, turn: list[int], gate: threading.Condition) -> None:
        self.me, self.turn, self.gate = me, turn, gate
        self.seconds: list[float] = []
        self.began = 0.0

    def begin(self) -> None:
        with self.gate:
            self.gate.wait_for(lambda: self.turn[0] in (self.me, -1))
        self.began = time.perf_counter()

    def step_done(self) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        with self.gate:
            self.turn[0] = self.turn[0] if self.turn[0] == -1 else 1 - self.me
            self.gate.notify_all()
        self.begin()

    def end(self) -> None:
        with self.gate:
            self.turn[0] = -1
            self.gate.notify_all()


def with_lightning(turnstile: Turnstile, steps: int, options: dict[str, Any] | None) -> None:
    from lightning.pytorch import Callback, LightningModule, Trainer

    from composer_replication.lightning import AutoLoCoCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return self.model(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Watch(Callback):
        def on_train_start(self, *_: object) -> None:
            turnstile.begin()

        def on_train_batch_end(self, *_: object) -> None:
            turnstile.step_done()

    ours = [AutoLoCoCallback(**options)] if options is not None else []
    trainer = Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*ours, Watch()],
    )
    trainer.fit(Module(), DataLoader(Tokens(), batch_size=8))


def with_composer(turnstile: Turnstile, steps: int, options: dict[str, Any] | None) -> None:
    from composer import Callback, Trainer
    from composer.models import ComposerModel

    from composer_replication.composer import AutoLoCo

    class ForComposer(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.model(batch)

        def loss(self, outputs: torch.Tensor, batch: Any, *_: Any, **__: Any) -> torch.Tensor:
            return outputs

        def get_metrics(self, is_train: bool) -> dict[str, Any]:
            return {}

    class Watch(Callback):
        def fit_start(self, state: Any, logger: Any) -> None:
            turnstile.begin()

        def batch_end(self, state: Any, logger: Any) -> None:
            turnstile.step_done()

    model = ForComposer()
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(Tokens(), batch_size=8),
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-4),
        max_duration=f"{steps}ba",
        algorithms=[AutoLoCo(**options)] if options is not None else [],
        callbacks=[Watch()],
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()


def compare(fit: Callable[[Turnstile, int, dict[str, Any] | None], None], pairs: int, folder: str) -> tuple[float, ...]:
    """(seconds of a plain step, median ratio, and the ends of its 95 % interval)."""
    steps = pairs + 10
    gate, turn = threading.Condition(), [0]
    options = {"store": f"file://{folder}/{fit.__name__}", "replica": 0, "replicas": 1}
    options |= {"base_horizon": 10 * steps, "policy": "fixed"}
    turnstiles = [Turnstile(index, turn, gate) for index in range(2)]

    def one(turnstile: Turnstile, given: dict[str, Any] | None) -> None:
        try:
            fit(turnstile, steps, given)
        finally:
            turnstile.end()  # whatever happened, the other one goes on

    with ThreadPoolExecutor(2) as pool:
        fits = [pool.submit(one, *pair) for pair in zip(turnstiles, (None, options), strict=True)]
    for done in fits:
        done.result()
    plain, ours = (turnstile.seconds[5:-5] for turnstile in turnstiles)
    ratios = sorted(b / a for a, b in zip(plain, ours, strict=True))
    count = len(ratios)
    half = 0.98 * math.sqrt(count)  # 95 % of the binomial that places the median among the order statistics
    low, high = ratios[max(int(count / 2 - half), 0)], ratios[min(int(count / 2 + half), count - 1)]
    return statistics.median(plain), statistics.median(ratios), low, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--trainer", nargs="+", choices=TRAINERS, default=[t for t in TRAINERS if find_spec(t)])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in arguments.trainer:
        with tempfile.TemporaryDirectory() as folder:
            fit = {"lightning": with_lightning, "composer": with_composer}[name]
            seconds, median, low, high = compare(fit, arguments.pairs, folder)
        print(
            f"{name}: {arguments.pairs} pairs, plain step {1e3 * seconds:.1f} ms; with the adapter / without: "
            f"median {median:.4f}, 95 % interval [{low:.4f}, {high:.4f}]",
            flush=True,
        )


if __name__ == "__main__":
    main()
