"""Does a slow replica slow another's steps, where one launcher's world is cut into replicas of two ranks?

    python benchmarks/split_world.py [--blocks 10] [--seconds 3]

Four processes, two replicas of two ranks (DDP inside each, gloo), one long interval. The second replica alternates
between doing nothing for some seconds and training with 0.4 s of sleep a batch for as long; the first one trains
without a pause, and its steps are sorted by what the second did meanwhile. So whatever else the machine does falls on
both kinds alike, and no more processes are busy than there are cores (two: the first replica's). Prints the ratio of
the first replica's median step times, and its range over the pairs of blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SLOW_SECONDS = 0.4


def phase(now: float, began: float, seconds: float) -> int:
    """Number of the block: even ones are quiet, in odd ones the second replica trains slowly."""
    return int((now - began) // seconds)


def rank_main(out: Path, began: float, blocks: int, seconds: float) -> None:
    from composer_replication.isolate import isolate_world

    identity = isolate_world(2)

    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader, Dataset

    from composer_replication.lightning import AutoLoCoCallback

    torch.set_num_threads(1)
    end = began + blocks * seconds
    slow = identity.replica == 1

    class Samples(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 10_000_000

        def __getitem__(self, index: int) -> torch.Tensor:
            if slow:
                now = time.time()
                block = phase(now, began, seconds)
                quiet = now < began or block % 2 == 0
                until = began if now < began else began + (block + 1) * seconds
                time.sleep(max(until - now, 0.0) if quiet else SLOW_SECONDS)
            return torch.full((512,), float(index % 7))

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
            self.times: list[float] = []

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.times.append(time.time())
            # The first replica's steps are long enough to measure; the second's work is next to nothing.
            return self.net(batch.repeat(1 if slow else 1024, 1)).square().mean()

        def on_train_batch_end(self, *_: Any) -> None:
            if time.time() > end:
                self.trainer.should_stop = True

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    model = Model()
    ours = AutoLoCoCallback((out / "store").as_uri(), policy="fixed", base_horizon=1_000_000)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="local_replica",
        callbacks=[ours],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    time.sleep(max(began - 15 - time.time(), 0.0))  # imports and the first meeting take their time
    trainer.fit(model, DataLoader(Samples(), batch_size=1))
    if trainer.global_rank == 0:
        (out / f"replica-{identity.replica}.json").write_text(json.dumps(model.times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--start-seconds", type=float, default=60.0, help="until all processes are up")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank:
        rank_main(Path(chosen.rank[0]), float(chosen.rank[1]), chosen.blocks, chosen.seconds)
        return
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        began = time.time() + chosen.start_seconds
        launcher = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        root = str(Path(__file__).parent.parent)
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", folder, str(began)]
                + ["--blocks", str(chosen.blocks), "--seconds", str(chosen.seconds)],
                env={**os.environ, **launcher, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root, "PYTHONWARNINGS": "ignore"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if rank else None,
            )
            for rank in range(4)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            sys.exit(f"the processes ended with {codes}")
        fast, slow = (json.loads((Path(folder) / f"replica-{i}.json").read_text()) for i in (0, 1))
    report(fast, slow, began, chosen.seconds, chosen.blocks)


def report(fast: list[float], slow: list[float], began: float, seconds: float, blocks: int) -> None:
    steps: dict[int, list[float]] = {block: [] for block in range(blocks)}
    for start, end in zip(fast, fast[1:], strict=False):
        block = phase(start, began, seconds)
        if block in steps and phase(end, began, seconds) == block and start >= began:
            steps[block].append(end - start)
    if not all(steps.values()):
        sys.exit(
            f"no steps in some blocks: give more --start-seconds (the first step was {fast[0] - began:.1f} s late)"
        )
    medians = [statistics.median(steps[block]) for block in range(blocks)]
    pairs = [medians[block + 1] / medians[block] for block in range(0, blocks - 1, 2)]
    quiet = [step for block in range(0, blocks, 2) for step in steps[block]]
    beside = [step for block in range(1, blocks, 2) for step in steps[block]]
    slow_batches = sum(phase(at, began, seconds) % 2 == 1 for at in slow if at >= began)
    print(f"first replica: {len(quiet)} steps beside a quiet replica, {len(beside)} beside a slow one")
    print(f"slow replica: {slow_batches} batches of {SLOW_SECONDS} s")
    print(f"median step: {statistics.median(quiet) * 1000:.1f} ms and {statistics.median(beside) * 1000:.1f} ms")
    ratio = statistics.median(beside) / statistics.median(quiet)
    print(f"ratio {ratio:.3f} ({min(pairs):.3f} to {max(pairs):.3f} over {len(pairs)} pairs of blocks)")


if __name__ == "__main__":
    main()
