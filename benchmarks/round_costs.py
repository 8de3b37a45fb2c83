"""What rounds cost from 2 to 1,024 replicas, worked out: bytes, requests, dollars, seconds, and where direct and
sharded cross; and how right that is for small rounds that are measured.

    python benchmarks/round_costs.py
    python benchmarks/round_costs.py --up 12.5 --down 12.5 --latency 0.05    # MB/s and seconds
    python benchmarks/round_costs.py --prices my_prices.json
    python benchmarks/round_costs.py --measure file:///tmp/rounds            # or s3://bucket/prefix?endpoint_url=...

Who averages which chunks is asked of the code that the rounds use. `my_prices.json` holds any of the names below.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from composer_replication.collective.base import Contribution, Report, RoundOutcome, Snapshot
from composer_replication.collective.layout import Layout, Slot
from composer_replication.collective.object_store import ObjectStoreCollective, keys
from composer_replication.collective.object_store.costs import (
    Link,
    Share,
    encoded_sizes,
    mean_sizes,
    plain_layout,
    round_seconds,
    round_shares,
)
from composer_replication.collective.object_store.roster import Mode
from composer_replication.errors import ObjectMissing
from composer_replication.readable import byte_count
from composer_replication.store import ObjectStore, PrefixedStore, open_store

REPLICAS = (2, 4, 8, 16, 64, 256, 1024)
PAYLOADS = (1e6, 64e6, 1e9, 16e9)  # bytes of one contribution


@dataclass(frozen=True)
class Prices:
    """Dollars. Amazon S3 Standard, us-east-1, list prices of November 2026 (aws.amazon.com/s3/pricing)."""

    put: float = 0.005 / 1000  # also a creation, and a listing
    get: float = 0.0004 / 1000
    egress_gb: float = 0.09  # out to the internet, the first 10 TB of a month; nothing within the region


def dollars(shares: Iterable[Share], prices: Prices) -> tuple[float, float]:
    """Of the whole fleet for a round: requests, and what leaves for the internet."""
    found = list(shares)
    requests = sum(share.puts * prices.put + share.gets * prices.get for share in found)
    return requests, sum(share.down_bytes for share in found) / 1e9 * prices.egress_gb


def sizes_of(payload: float) -> list[int]:
    """int8 chunks of a contribution of about that many bytes."""
    return encoded_sizes("int8", plain_layout(max(1, int(payload / (1 + 4 / 4096)))))


def table(link: Link, prices: Prices) -> None:
    print(
        f"link: {link.up / 1e6:g} MB/s up, {link.down / 1e6:g} MB/s down, {1000 * link.request_seconds:g} ms a "
        "request; int8; the busiest replica, and the fleet's dollars for a round\n"
    )
    print(
        "| payload | replicas | mode | shards | sent | received | requests | seconds | floors | $ requests | $ egress |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for payload in PAYLOADS:
        sizes = sizes_of(payload)
        for replicas in REPLICAS:
            shares = round_shares(replicas, sizes)
            worst = max(shares, key=lambda share: round_seconds(share, link, sum(sizes)))
            seconds = round_seconds(worst, link, sum(sizes))
            floor = max(sum(sizes) / link.up, 2 * (replicas - 1) / replicas * sum(sizes) / link.down)
            requests, egress = dollars(shares, prices)
            print(
                f"| {byte_count(payload)} | {replicas} | {'direct' if worst.direct else 'sharded'} | {worst.shards} "
                f"| {byte_count(worst.up_bytes)} | {byte_count(worst.down_bytes)} | {worst.puts + worst.gets} "
                f"| {seconds:.3g} | {seconds / floor:.2f} | {requests:.2g} | {egress:.2g} |"
            )


def crossovers(prices: Prices) -> None:
    """The payload below which reading everything is quicker than averaging in shards."""
    print("\n| replicas | 12.5 MB/s, 20 ms | 12.5 MB/s, 100 ms | 125 MB/s, 20 ms | 125 MB/s, 100 ms | fewer $ |")
    print("|---|---|---|---|---|---|")
    for replicas in (2, 3, 4, 8, 16, 64, 256, 1024):
        cells: list[str] = []
        for speed in (12.5e6, 125e6):
            for latency in (0.02, 0.1):
                cells.append(_crossover(replicas, Link(up=speed, down=speed, request_seconds=latency)))
        direct, sharded = (
            dollars(round_shares(replicas, sizes_of(64e6), mode=m), prices)[0] for m in ("direct", "sharded")
        )
        cheaper = (
            f"{'direct' if direct < sharded else 'sharded'} ({max(direct, sharded) / min(direct, sharded):.1f} times)"
        )
        print(f"| {replicas} | {' | '.join(cells)} | {cheaper} |")


def _crossover(replicas: int, link: Link) -> str:
    def direct_wins(payload: float) -> bool:
        sizes = sizes_of(payload)
        direct, sharded = (
            max(round_seconds(share, link, sum(sizes)) for share in round_shares(replicas, sizes, mode=mode))
            for mode in ("direct", "sharded")
        )
        return direct <= sharded

    ladder = [2.0**power for power in range(12, 35)]
    won = [payload for payload in ladder if direct_wins(payload)]
    if not won:
        return "never"
    return f"below {byte_count(max(won) * 2)}" if len(won) < len(ladder) else "always"


# -- measured


class Counted:
    """A store that counts what one replica asks of it, by kind of key."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.count: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        return self.store.uri

    def _add(self, key: str, what: str, size: int = 0) -> None:
        kind = "blob" if keys.is_blob(key) else "other" if key.startswith(("members/", "claims/")) else "pointer"
        with self._lock:
            self.count[f"{kind} {what}"] += 1
            self.count[f"{kind} {what} bytes"] += size

    def put(self, key: str, data: bytes) -> None:
        self._add(key, "write", len(data))
        self.store.put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._add(key, "create", len(data))
        self.store.put_if_absent(key, data)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        try:
            data = self.store.get(key, max_bytes=max_bytes)
        except ObjectMissing:
            self._add(key, "miss")
            raise
        self._add(key, "read", len(data))
        return data

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self.store.get_range(key, start, stop)

    def list(self, prefix: str) -> list[str]:
        return self.store.list(prefix)

    def delete(self, names: Iterable[str]) -> None:
        self.store.delete(names)


@dataclass(frozen=True)
class Measured:
    """One replica in one round."""

    replica: int
    round: int
    count: Counter[str]
    seconds: float


def measure(
    store: ObjectStore, layout: Layout, *, replicas: int, codec: str, rounds: int, mode: Mode = "auto"
) -> list[Measured]:
    """Rounds of threads, all ready at once, without an outer step; the first, in which they get to know one another, is
    left out."""
    barrier = threading.Barrier(replicas)
    found: list[Measured] = []
    failed: list[BaseException] = []

    def replica(index: int) -> None:
        try:
            found.extend(_replica(index, store, layout, barrier, replicas, codec, rounds, mode))
        except BaseException as error:  # noqa: BLE001 - raised again below
            failed.append(error)
            barrier.abort()

    threads = [threading.Thread(target=replica, args=(index,)) for index in range(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return [each for each in found if each.round > 0]


def _replica(
    index: int,
    store: ObjectStore,
    layout: Layout,
    barrier: threading.Barrier,
    replicas: int,
    codec: str,
    rounds: int,
    mode: Mode,
) -> list[Measured]:
    counted = Counted(store)
    settings = {"heartbeat_seconds": 600.0, "poll_seconds": 0.01, "max_poll_seconds": 0.05, "checkpoint_every": 10_000}
    collective = ObjectStoreCollective(counted, replica=index, replicas=replicas, codec=codec, mode=mode, **settings)  # type: ignore[arg-type]
    empty = Layout(())

    def snapshot(round: int) -> Snapshot:
        return Snapshot(round=round, layout=empty, anchor=(), momentum=(), state={}, digest=f"{round:032x}")

    collective.start(snapshot(0), settings={}, resumed=False)
    values = torch.randn(layout.elements, generator=torch.Generator().manual_seed(index))
    starts = [0]
    for chunk in layout.chunks:
        starts.append(starts[-1] + chunk.elements)
    found: list[Measured] = []
    for round in range(rounds + 1):
        report = Report(
            replica=index, steps=1, tokens=None, mass=0.0, square_norm=1.0, finite=True, leaving=round == rounds,
            next_lr=0.0, preview=(), remaining=None, base=f"{round:032x}", layout=layout.fingerprint,
        )  # fmt: skip
        barrier.wait()
        before, began = counted.count.copy(), time.perf_counter()
        outcome: RoundOutcome = collective.average(
            Contribution(round, report, layout, lambda i: values[starts[i] : starts[i + 1]])
        )
        seconds = time.perf_counter() - began
        counts = counted.count - before
        collective.applied(lambda round=round: snapshot(round + 1))
        assert len(outcome.members) == replicas
        found.append(Measured(index, round, counts, seconds))
    collective.close()
    return found


def compare(uri: str, codec: str, payload_elements: int, chunk_elements: int, rounds: int) -> None:
    print("\n| replicas | mode | bytes sent | received | blobs written | read | pointers created | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    whole = open_store(uri)
    up, down, latency = _speed(whole)
    print(f"<!-- link as measured: {up / 1e6:.0f} MB/s up, {down / 1e6:.0f} MB/s down, {1000 * latency:.1f} ms -->")
    layout = Layout((Slot("model", (payload_elements,), "torch.float32"),), chunk_elements)
    for replicas in (2, 4, 8):
        modes: tuple[Mode, ...] = ("direct", "sharded")
        for mode in modes:
            store = PrefixedStore(whole, f"costs-{uuid.uuid4().hex[:8]}")
            found = measure(store, layout, replicas=replicas, codec=codec, rounds=rounds, mode=mode)
            store.delete(store.list(""))
            rows = deviations(found, codec, layout, replicas, mode)
            link = Link(up=up / replicas, down=down / replicas, request_seconds=latency)  # one machine's, shared by all
            sizes = encoded_sizes(codec, layout)
            predicted = max(round_seconds(s, link, sum(sizes)) for s in round_shares(replicas, sizes, mode=mode))
            ratio = statistics.median(each.seconds for each in found) / predicted
            print(f"| {replicas} | {mode} | {' | '.join(rows)} | {ratio:.2f} |")


NAMES = {
    "up_bytes": "blob write bytes",
    "down_bytes": "blob read bytes",
    "writes": "blob write",
    "reads": "blob read",
    "creates": "pointer create",
}


def sums(found: list[Measured], codec: str, layout: Layout, replicas: int, mode: Mode) -> dict[str, tuple[int, int]]:
    """(measured, worked out) of all replicas and rounds together."""
    totals: Counter[str] = Counter()
    for each in found:
        inputs = encoded_sizes(codec, layout, round=each.round, replica=each.replica)
        means = mean_sizes(codec, layout, round=each.round)
        share = round_shares(replicas, inputs, means, mode=mode, round=each.round)[each.replica]
        for name, counted in NAMES.items():
            totals[name] += getattr(share, name)
            totals[f"{name} measured"] += each.count[counted]
    return {name: (totals[f"{name} measured"], totals[name]) for name in NAMES}


def deviations(found: list[Measured], codec: str, layout: Layout, replicas: int, mode: Mode) -> list[str]:
    return [
        f"{measured / expected:.4f}" if expected else f"{measured} of 0"
        for measured, expected in sums(found, codec, layout, replicas, mode).values()
    ]


def _speed(store: ObjectStore) -> tuple[float, float, float]:
    from composer_replication.store.probe import Effort, probe_store

    found = probe_store(lambda: store, effort=Effort(max_bytes=8 * 1024 * 1024))
    return found.up, found.down, found.latency_seconds["read"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--up", type=float, default=12.5, help="MB/s (default 12.5, which is 100 Mbit/s)")
    parser.add_argument("--down", type=float, default=12.5, help="MB/s")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds of a small request (default 0.05)")
    parser.add_argument("--prices", type=Path, help="JSON with any of put, get, egress_gb, in dollars")
    parser.add_argument("--measure", metavar="URI", help="compare small rounds in this store with what is worked out")
    parser.add_argument("--elements", type=int, default=4_000_000, help="of a measured contribution")
    parser.add_argument("--rounds", type=int, default=3, help="measured")
    arguments = parser.parse_args()
    prices = Prices()
    if arguments.prices is not None:
        prices = Prices(**{**asdict(prices), **json.loads(arguments.prices.read_text())})
    if arguments.measure:
        compare(arguments.measure, "int8", arguments.elements, 64 * 4096, arguments.rounds)
        return
    link = Link(up=arguments.up * 1e6, down=arguments.down * 1e6, request_seconds=arguments.latency)
    table(link, prices)
    crossovers(prices)


if __name__ == "__main__":
    main()
