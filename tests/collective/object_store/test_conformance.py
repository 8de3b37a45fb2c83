"""The object-store collective against the suite that every collective passes, in threads over a store in memory."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from composer_replication.collective.base import Collective
from composer_replication.collective.guards import Guards
from composer_replication.collective.object_store import ObjectStoreCollective
from composer_replication.store import LocalStore, MemoryStore
from tests.collective import conformance
from tests.support.threads import run_threads


def play(
    store: Any,
    replicas: int,
    codec: str,
    mode: str,
    script: conformance.Script,
    guards: Guards | None = None,
    **options: Any,
) -> list[Any]:
    collectives = [
        ObjectStoreCollective(
            store,
            replica=replica,
            replicas=replicas,
            codec=codec,
            mode=mode,  # type: ignore[arg-type]
            poll_seconds=0.002,
            max_poll_seconds=0.02,
            timeout_seconds=30.0,
            guards=guards,
            **options,
        )
        for replica in range(replicas)
    ]
    all_through = threading.Barrier(replicas)

    def whole(collective: Collective) -> Any:
        try:
            return script(collective)
        finally:
            all_through.wait(timeout=60)
            collective.close()

    return run_threads([partial(whole, collective) for collective in collectives])


@pytest.mark.parametrize("mode", ["direct", "sharded"])
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_conformance(check: Any, mode: str) -> None:
    def run(replicas: int, codec: str, script: conformance.Script, guards: Guards | None = None) -> list[Any]:
        return play(MemoryStore(), replicas, codec, mode, script, guards)

    check(run)


def test_conformance_over_files(tmp_path: Path) -> None:
    count = iter(range(100))

    def run(replicas: int, codec: str, script: conformance.Script) -> list[Any]:
        return play(LocalStore(tmp_path / f"{next(count)}"), replicas, codec, "auto", script)

    conformance.check_same_bits_everywhere(run)
    conformance.check_leaving(run)
