"""Two replicas as processes of this machine train a small causal language model through a folder, and one does alone.

    python spikes/009-a-local-process/run.py        (about three minutes on two cores; needs lightning and transformers)

Prints a table, and fails if the two don't end with the same weights.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from small_model import ROOT, save_model, save_text

from composer_replication.diloco.serverless import LocalProcessExecutor, ReplicaResult, ReplicaSpec


def fleet(replicas: int, options: argparse.Namespace, folder: Path) -> tuple[list[ReplicaResult], float]:
    """(how each replica ended, seconds from launch to the last one's end)."""
    specs = [
        ReplicaSpec(
            replica_id=i,
            num_replicas=replicas,
            rendezvous_uri=(folder / f"store-{replicas}").as_uri(),
            model_id=str(folder / "model"),
            inner_optimizer={"name": "AdamW", "lr": options.lr},
            sync_every=options.sync_every,
            outer_rounds=options.outer_rounds,
            extra_env={"DATA_URI": (folder / "text.jsonl").as_uri()},
            overrides=("model.args.dtype=float32", "training.accelerator=cpu", "training.threads=1"),
        )
        for i in range(replicas)
    ]
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    executor = LocalProcessExecutor(output=folder / f"out-{replicas}", env=environment)
    began = time.monotonic()
    handles = executor.launch_replicas(specs)
    results = executor.collect(handles)
    seconds = time.monotonic() - began
    for handle, result in zip(handles, results, strict=True):
        if result.status != "completed":
            raise SystemExit("\n".join(executor.last_lines(handle)))
    return results, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sync-every", type=int, default=25, help="inner steps in a round")
    parser.add_argument("--outer-rounds", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = save_model(folder / "model")
        save_text(folder / "text.jsonl")
        print(f"{parameters} parameters, {options.outer_rounds} rounds of {options.sync_every} steps\n", flush=True)
        print("| replicas | validation loss | launch to end, s | in the rounds, s | waiting, s | sent by each, MB |")
        print("|---|---|---|---|---|---|", flush=True)
        for replicas in (1, 2):
            results, seconds = fleet(replicas, options, folder)
            if len({result.metrics["digest"] for result in results}) != 1:
                raise SystemExit("the replicas' weights differ")
            metrics = [result.metrics for result in results]
            exchange, wait = (max(one[f"{kind}_seconds"] for one in metrics) for kind in ("exchange", "wait"))
            print(
                f"| {replicas} | {metrics[0]['validation_loss']:.3f} | {seconds:.0f} | {exchange:.2f} | {wait:.2f} | "
                f"{max(one['bytes_sent'] for one in metrics) / 1e6:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
