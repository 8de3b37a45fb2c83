"""A round's time over links that are emulated in this process: what the protocol itself costs on any machine.

    python benchmarks/emulated_round.py [--replicas 4] [--seconds 10.24] [--schemes store,store-int8,leader]

Replicas are threads over a store in memory; what each of them reads and writes is carried in 32 kB pieces by a link of
its own, each way, whose rate is such that a payload in bfloat16 takes `--seconds`, and every request waits
`--latency-milliseconds` first. The payload is small, so that the processors have next to nothing to do: 128 MB at
100 Mbit/s take 10.24 s, and so do 5 MB here. `throttled_round.py` is the same over real links and a real server.
The floor is 2 (N-1)/N of the payload, each way. `leader`: everyone writes, one reads all, averages, writes the mean,
everyone reads it.
"""

from __future__ import annotations

import argparse
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from composer_replication.collective.base import Contribution, Report, Snapshot
from composer_replication.collective.layout import Layout, Slot
from composer_replication.collective.object_store import ObjectStoreCollective
from composer_replication.errors import ObjectMissing
from composer_replication.store import MemoryStore
from composer_replication.store.base import Buffer

PIECE_BYTES = 32 * 1024


class Direction:
    """One direction of a link. Transfers side by side share it, piece by piece."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def carry(self, size: int) -> None:
        while size > 0:
            piece = min(PIECE_BYTES, size)
            size -= piece
            with self._lock:
                self._free_at = there = max(self._free_at, time.monotonic()) + piece / self._rate
            time.sleep(max(there - time.monotonic(), 0.0))


class Linked(MemoryStore):
    """One replica's view of a store behind its link."""

    def __init__(self, store: MemoryStore, bytes_per_second: float, latency_seconds: float) -> None:
        super().__init__("emulated")
        self._objects, self._lock = store._objects, store._lock
        self._up, self._down, self._latency = Direction(bytes_per_second), Direction(bytes_per_second), latency_seconds

    def put(self, key: str, data: Buffer) -> None:
        time.sleep(self._latency)
        self._up.carry(len(data))
        super().put(key, data)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        time.sleep(self._latency)
        self._up.carry(len(data))
        super().put_if_absent(key, data)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        time.sleep(self._latency)
        data = super().get(key, max_bytes=max_bytes)
        self._down.carry(len(data))
        return data

    def list(self, prefix: str) -> list[str]:
        time.sleep(self._latency)
        return super().list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        time.sleep(self._latency)
        super().delete(keys)


class Table:
    """When each replica began and ended each round, and what it cost."""

    def __init__(self, replicas: int) -> None:
        self.start = threading.Barrier(replicas)
        self.rounds: dict[int, list[dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def add(self, round: int, **values: Any) -> None:
        with self._lock:
            self.rounds.setdefault(round, []).append(values)

    def seconds(self, round: int) -> float:
        results = self.rounds[round]
        return max(r["ended"] for r in results) - min(r["began"] for r in results)


def store_replica(store: Linked, replica: int, codec: str, options: argparse.Namespace, table: Table) -> None:
    collective = ObjectStoreCollective(
        store, replica=replica, replicas=options.replicas, codec=codec, mode="sharded", heartbeat_seconds=5.0
    )
    small = Layout((Slot("w", (1,), "torch.float32"),))
    layout = Layout((Slot("w", (options.elements,), "torch.float32"),), options.chunk_elements)
    values = torch.randn(options.chunk_elements, generator=torch.Generator().manual_seed(replica))
    zero = [torch.zeros(1)]
    state = Snapshot(round=0, layout=small, anchor=zero, momentum=(), state={}, digest=hashlib.sha256(b"").hexdigest())
    base = collective.start(state, settings={}, resumed=False).digest
    for number in range(options.rounds):
        report = Report(
            replica=replica,
            steps=1,
            tokens=None,
            mass=1.0,
            square_norm=1.0,
            finite=True,
            leaving=number == options.rounds - 1,
            next_lr=1.0,
            preview=(1.0,),
            remaining=None,
            base=base,
            layout=layout.fingerprint,
        )
        before = Counter(collective.requests)
        table.start.wait()
        began = time.monotonic()
        outcome = collective.average(
            Contribution(number, report, layout, lambda chunk: values[: layout.chunks[chunk].elements])
        )
        table.add(
            number,
            began=began,
            ended=time.monotonic(),
            sent=outcome.bytes_sent,
            received=outcome.bytes_received,
            requests=Counter(collective.requests) - before,
        )
        base = hashlib.sha256(base.encode()).hexdigest()
        after = Snapshot(round=number + 1, layout=small, anchor=zero, momentum=zero, state={}, digest=base)
        collective.applied(lambda after=after: after)
    table.start.wait()
    collective.close()


def leader_replica(store: Linked, replica: int, codec: str, options: argparse.Namespace, table: Table) -> None:
    payload = torch.randn(options.elements).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()

    def read(key: str) -> bytes:
        while True:
            try:
                return store.get(key)
            except ObjectMissing:
                time.sleep(0.1)

    for number in range(options.rounds):
        table.start.wait()
        began = time.monotonic()
        store.put(f"{number}/{replica}", payload)
        if replica == 0:
            parts = [read(f"{number}/{i}") for i in range(options.replicas)]
            total = torch.zeros(options.elements)
            for part in parts:
                total += torch.frombuffer(bytearray(part), dtype=torch.bfloat16)
            mean = total.div_(options.replicas).to(torch.bfloat16)
            store.put(f"{number}/mean", mean.view(torch.uint8).numpy().tobytes())
        read(f"{number}/mean")
        table.add(
            number, began=began, ended=time.monotonic(), sent=len(payload), received=len(payload), requests=Counter()
        )


SCHEMES: dict[str, Callable[[Linked, int, str, argparse.Namespace, Table], None]] = {
    "store": store_replica,
    "leader": leader_replica,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=5.12, help="of the payload, in bfloat16")
    parser.add_argument("--seconds", type=float, default=10.24, help="that the payload takes, each way")
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--latency-milliseconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--schemes", default="store,store-int8,leader")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.elements = int(options.megabytes * 1e6) // 2
    options.chunk_elements = max(1, round(options.elements / options.chunks / 4096)) * 4096
    rate = 2 * options.elements / options.seconds
    floor = 2 * (options.replicas - 1) / options.replicas * options.seconds
    print(
        f"{options.replicas} replicas, a payload takes {options.seconds:g} s each way: floor {floor:.2f} s", flush=True
    )
    best: dict[str, float] = {}
    for name in options.schemes.split(","):
        scheme, _, codec = name.partition("-")
        shared, table = MemoryStore(), Table(options.replicas)
        threads = [
            threading.Thread(
                target=SCHEMES[scheme],
                args=(
                    Linked(shared, rate, options.latency_milliseconds / 1000),
                    *(replica, codec or "bfloat16", options, table),
                ),
            )
            for replica in range(options.replicas)
        ]
        used = time.process_time()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        used = time.process_time() - used
        times = [table.seconds(number) for number in range(options.rounds)]
        fastest = min(range(options.rounds), key=times.__getitem__)
        best[name] = times[fastest]
        results = table.rounds[fastest]
        own_floor = floor * (0.5 if codec == "int8" else 1.0)
        requests = max((r["requests"] for r in results), key=lambda counter: sum(counter.values()))
        print(
            f"{name:11} {' '.join(f'{seconds:.2f}' for seconds in times)} s = {best[name] / own_floor:.3f} x its floor"
            f"  |  sent {max(r['sent'] for r in results) / 1e6:.2f} MB, received"
            f" {max(r['received'] for r in results) / 1e6:.2f} MB, requests {dict(requests)}"
            f"  |  CPU {used / options.rounds:.1f} s a round",
            flush=True,
        )
    for name, seconds in best.items():
        if name != "store" and "store" in best:
            print(f"{name} / store: {seconds / best['store']:.2f}")


if __name__ == "__main__":
    main()
