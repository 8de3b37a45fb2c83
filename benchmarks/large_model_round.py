"""A model of 100 M parameters through a few rounds of two processes over files: seconds by phase, and peak memory.

    python benchmarks/large_model_round.py [--elements 100000000] [--codec int8] [--rounds 4]

Prints one line a round of replica 0, then what the process held at most, beyond the weights themselves, in units of the
float32 weights (anchor and momentum make 2).
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
from pathlib import Path

import torch

from composer_replication.autoloco import FixedPolicy
from composer_replication.autoloco.values import Preview
from composer_replication.collective.object_store import ObjectStoreCollective
from composer_replication.diloco.loop import OuterLoop


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def replica(index: int, count: int, elements: int, codec: str, rounds: int, root: str) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(index)
    width = 4096 * 1024
    model = {
        f"block{i}": torch.zeros(min(width, elements - start)) for i, start in enumerate(range(0, elements, width))
    }
    for tensor in model.values():
        tensor.normal_(generator=torch.Generator().manual_seed(0))
    noise = torch.randn(width, generator=generator) * 1e-3
    held = peak_bytes()
    policy = FixedPolicy(horizon=1)
    collective = ObjectStoreCollective(f"file://{root}", replica=index, replicas=count, codec=codec)
    loop = OuterLoop(model, collective, policy=policy)

    def preview(remaining: int) -> Preview:
        return Preview(steps=policy.grid, sums=(float(remaining > 0),), next_lr=1.0, remaining=remaining)

    loop.start(preview(rounds))
    for done in range(rounds):
        for tensor in model.values():
            tensor.add_(noise[: tensor.numel()])
        loop.step_done(1.0)
        summary = loop.close_interval(preview(rounds - done - 1))
        if index == 0:
            phases = "  ".join(f"{name} {seconds:.2f}" for name, seconds in sorted(summary.phase_seconds.items()))
            print(
                f"round {summary.round}: {summary.exchange_seconds:.2f} s, waiting {summary.wait_seconds:.2f}"
                f"  |  {phases}"
                f"  |  sent {summary.bytes_sent / 1e6:.1f} MB, received {summary.bytes_received / 1e6:.1f} MB",
                flush=True,
            )
    final = loop.finish(preview(0))
    if index == 0:
        extra = peak_bytes() - held
        print(f"digest {final.digest}")
        print(f"peak beyond weights: {extra / 1e6:.0f} MB = {extra / (4 * elements):.2f} x the float32 weights")
    loop.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=100_000_000)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        root = str(Path(folder) / "run")
        count = arguments.replicas
        processes = [
            context.Process(
                target=replica, args=(i, count, arguments.elements, arguments.codec, arguments.rounds, root)
            )
            for i in range(count)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
