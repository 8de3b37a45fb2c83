"""What streaming fragments over our store cost and give: four ways to exchange, one model, two replicas in threads.

    python spikes/008-streaming-diloco/run.py        (under a minute; needs torchft)

Prints a table: the largest round's bytes, bytes in all, seconds that the training thread was held up, validation loss.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from composer_replication import ObjectStoreCollective
from composer_replication.diloco import make_diloco_outer_loop
from composer_replication.diloco.serverless import ObjectStoreManager
from composer_replication.store import LocalStore

REPLICAS, WIDTH = 2, 256
WAYS = [("whole model", 1, 0), ("4 fragments", 4, 0), ("4 fragments, delay 2", 4, 2), ("4 fragments, delay 4", 4, 4)]


class FarStore(LocalStore):
    """A folder behind a line: each request takes a round trip, each byte its time."""

    round_trip_seconds = 0.0
    bytes_per_second = float("inf")

    def _travel(self, size: int) -> None:
        time.sleep(self.round_trip_seconds + size / self.bytes_per_second)

    def put(self, key, data) -> None:
        self._travel(len(data))
        super().put(key, data)

    def put_if_absent(self, key, data) -> None:
        self._travel(len(data))
        super().put_if_absent(key, data)

    def get(self, key, *, max_bytes=None) -> bytes:
        data = super().get(key, max_bytes=max_bytes)
        self._travel(len(data))
        return data

    def get_range(self, key, start, stop) -> bytes:
        data = super().get_range(key, start, stop)
        self._travel(len(data))
        return data

    def list(self, prefix) -> list[str]:
        self._travel(0)
        return super().list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        self._travel(0)
        super().delete(keys)


class Counted(ObjectStoreCollective):
    """Keeps what each round sent."""

    def average(self, contribution):
        outcome = super().average(contribution)
        self.sent = [*getattr(self, "sent", []), outcome.bytes_sent]
        return outcome


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1, bias=False)))


def loss_of(model: nn.Module, teacher: nn.Module, generator: torch.Generator, *, count: int = 32) -> torch.Tensor:
    """Squared error against a fixed network, as a share of the target's own square."""
    inputs = torch.randn(count, WIDTH, generator=generator)
    with torch.no_grad():
        targets = teacher(inputs)
    return (model(inputs) - targets).square().mean() / targets.square().mean()


def one_way(fragments: int, delay: int, options: argparse.Namespace, folder: Path) -> tuple[int, int, float, float]:
    teacher, models = network(1000), [network(options.seed) for _ in range(REPLICAS)]
    held_up, collectives = [0.0] * REPLICAS, []
    for replica in range(REPLICAS):
        store = FarStore(folder)
        store.round_trip_seconds, store.bytes_per_second = options.round_trip, options.rate
        collectives.append(Counted(store, replica=replica, replicas=REPLICAS, codec="int8", poll_seconds=0.01))

    def live(replica: int) -> None:
        model, generator = models[replica], torch.Generator().manual_seed(options.seed * 100 + replica)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
        parts = [model] if fragments == 1 else list(model)
        manager = ObjectStoreManager(collectives[replica])
        outer = make_diloco_outer_loop(
            manager, parts, optimizer, outer_momentum=0.6, sync_every=options.interval, fragment_sync_delay=delay
        )
        # Hooks run in the order of their registration: ours stand before and after torchft's.
        began = [0.0]
        optimizer.register_step_post_hook(lambda *_: began.__setitem__(0, time.monotonic()))
        with outer:
            optimizer.register_step_post_hook(
                lambda *_: held_up.__setitem__(replica, held_up[replica] + time.monotonic() - began[0])
            )
            for _ in range(options.steps):
                optimizer.zero_grad()
                loss_of(model, teacher, generator).backward()
                optimizer.step()
                time.sleep(options.step_seconds)  # an accelerator at work, which leaves the processor alone
        manager.shutdown()

    threads = [threading.Thread(target=live, args=(replica,)) for replica in range(REPLICAS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        loss = loss_of(models[0], teacher, torch.Generator().manual_seed(7), count=2048).item()
    sent = collectives[0].sent
    return max(sent), sum(sent), max(held_up), loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--interval", type=int, default=20, help="inner steps between two exchanges of a fragment")
    parser.add_argument("--step-seconds", type=float, default=0.03, help="added to each step, as if an accelerator ran")
    parser.add_argument("--round-trip", type=float, default=0.01, help="seconds that each request takes")
    parser.add_argument("--rate", type=float, default=2e6, help="bytes a second")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| way | largest round, kB | in all, kB | held up, s | loss |\n|---|---|---|---|---|", flush=True)
    for name, fragments, delay in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            most, total, seconds, loss = one_way(fragments, delay, options, Path(folder))
        print(f"| {name} | {most / 1000:.0f} | {total / 1000:.0f} | {seconds:.2f} | {loss:.3f} |", flush=True)


if __name__ == "__main__":
    main()
