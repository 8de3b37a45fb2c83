"""A user's script: Lightning's demo modules, and the two edits: `demo_program.py REPLICA STORE OUT`."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.demos import LightningTransformer
from lightning.pytorch.demos.boring_classes import BoringModel

from composer_replication.lightning import AutoLoCoCallback


def main(replica: int, store: str, out: Path) -> None:
    ends = {}
    for name, module, horizon in (("boring", BoringModel(), 10), ("lm", LightningTransformer(vocab_size=90), 3)):
        callback = AutoLoCoCallback(store, run=name, replica=replica, replicas=2, base_horizon=horizon)
        trainer = pl.Trainer(
            max_epochs=1,
            limit_train_batches=32 if name == "boring" else 8,
            accelerator="cpu",
            strategy="local_replica",  # the first edit
            callbacks=[callback],  # the second
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=out / f"root-{replica}",
        )
        trainer.fit(module)
        bits = hashlib.sha256(b"".join(t.numpy().tobytes() for t in module.state_dict().values())).hexdigest()
        assert callback.final is not None
        ends[name] = {
            "digest": callback.final.digest,
            "weights": bits,
            "rounds": [[summary.round, summary.steps, list(summary.members)] for summary in callback.rounds],
            "checkpoint": str(trainer.checkpoint_callback.best_model_path),
        }
    (out / f"replica-{replica}.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
