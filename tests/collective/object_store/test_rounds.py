"""Whole rounds over a store, with threads: the same bits as in process, under every mode and codec."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from composer_replication.collective.in_process import InProcessFleet
from composer_replication.collective.object_store import ObjectStoreCollective
from composer_replication.store import LocalStore, MemoryStore
from tests.collective.object_store.toy import Toy, run_toy


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.result(timeout=60) for future in futures]


def fleet(store: Any, replicas: int, rounds: int, **settings: Any) -> list[Toy]:
    defaults = {"poll_seconds": 0.002, "max_poll_seconds": 0.05, "heartbeat_seconds": 0.2, "timeout_seconds": 30.0}

    def life(replica: int) -> Callable[[], Toy]:
        return lambda: run_toy(
            Toy.fresh(replica),
            ObjectStoreCollective(store, replica=replica, replicas=replicas, **(defaults | settings)),
            rounds,
        )

    return together([life(replica) for replica in range(replicas)])


def in_process(replicas: int, rounds: int, codec: str) -> list[Toy]:
    collectives = InProcessFleet(replicas, codec=codec).collectives()
    return together([lambda c=c: run_toy(Toy.fresh(c.replica), c, rounds) for c in collectives])


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", ["auto", "direct", "sharded"])
def test_same_bits_as_in_process(tmp_path: Path, replicas: int, mode: str) -> None:
    codec = "int8" if replicas % 2 else "float32"
    reference = in_process(replicas, 3, codec)
    toys = fleet(LocalStore(tmp_path / "s"), replicas, 3, codec=codec, mode=mode)
    digests = {toy.digest for toy in (*toys, *reference)}
    assert len(digests) == 1
    assert [toy.applied for toy in toys] == [reference[0].applied] * replicas


def test_a_run_under_a_prefix_leaves_the_rest_alone() -> None:
    store = MemoryStore()
    store.put("other/fleet.json", b"not ours")
    fleet(store, 2, 2, run="runs/one")
    assert all(key.startswith("runs/one/") or key == "other/fleet.json" for key in store.list(""))
    assert store.get("other/fleet.json") == b"not ours"
