"""A replica to stop and start again: `stopped_program.py REPLICA REPLICAS STORE OUT SECONDS_PER_BATCH`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from composer_replication.lightning import AutoLoCoCallback, latest_checkpoint
from tests.lightning.helpers import QUIET, Tiny
from tests.lightning.test_resume import Rewindable


class Pace(pl.Callback):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        print(f"batch {trainer.fit_loop.total_batch_idx + 1}", flush=True)
        time.sleep(self.seconds)


def main(replica: int, replicas: int, store: str, out: Path, seconds: float) -> None:
    module = Tiny(optimizer="adamw", scheduler=True, lr=0.02, seed=replica)
    callback = AutoLoCoCallback(
        store,
        replica=replica,
        replicas=replicas,
        policy="fixed",
        base_horizon=3,
        timeout=60,
        checkpoint_dir=out,
    )
    trainer = pl.Trainer(**{**QUIET, "strategy": "auto"}, max_epochs=1, callbacks=[callback, Pace(seconds)])
    path = latest_checkpoint(out, replica)
    trainer.fit(module, Rewindable(24 * replicas, replica, replicas), ckpt_path=path, weights_only=True)
    assert callback.final is not None
    end = {"digest": callback.final.digest, "seen": module.seen, "rounds": callback.final.rounds}
    (out / f"replica-{replica}.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), float(sys.argv[5]))
