"""Replicas in real processes that kill themselves with signal 9 at a named step. Forked from a server that has
imported everything, so that a fleet of three takes a second or so.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from composer_replication.collective.object_store import ObjectStoreCollective, keys
from composer_replication.collective.object_store import fleet as claims
from composer_replication.errors import ObjectMissing
from composer_replication.store import ObjectStore, open_store
from tests.collective.object_store.toy import Toy, run_toy

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.collective.object_store.lives", "s3fs"])

DEFAULTS: dict[str, Any] = {
    "codec": "int8",
    "mode": "sharded",
    "poll_seconds": 0.005,
    "max_poll_seconds": 0.05,
    "heartbeat_seconds": 0.2,
    "timeout_seconds": 40.0,
    "takeover_seconds": 0.4,
    "checkpoint_every": 2,
}


@dataclass(frozen=True)
class Kill:
    step: str  # "before:ready"
    round: int = 0  # not before this round
    last: bool = False  # let the others declare themselves, and end, first: then the next step is this replica's to do
    signal: int = signal.SIGKILL


@dataclass(frozen=True)
class Fleet:
    """A folder with the replicas' records in it, and the store, unless that is elsewhere."""

    folder: Path
    replicas: int = 3
    rounds: int = 4
    settings: dict[str, Any] = field(default_factory=dict)
    uri: str = ""
    environment: dict[str, str] = field(default_factory=dict)  # credentials

    @property
    def store(self) -> ObjectStore:
        return open_store(self.uri or str(self.folder / "store"))

    def record(self, replica: int) -> Path:
        return self.folder / f"record-{replica}.pt"

    def start(
        self,
        replica: int,
        kill: Kill | None = None,
        *,
        fresh: bool = False,
        salt: int = 0,
        machine: str = "",  # a name if it is to seem another one than ours
        file_bytes: int | None = None,  # no file may become larger
        **settings: Any,
    ) -> BaseProcess:
        if fresh:
            self.record(replica).unlink(missing_ok=True)
        world = (salt, machine, file_bytes)
        arguments = (self, replica, kill, world, {**DEFAULTS, **self.settings, **settings})
        process = CONTEXT.Process(target=_live, args=arguments)
        process.start()
        return process

    def result(self, replica: int) -> dict[str, Any]:
        return json.loads(self.store.get(f"results/{replica}.json"))

    def ended(self, replica: int) -> dict[str, Any]:
        return json.loads((self.folder / f"ended-{replica}.json").read_text())


def _live(
    fleet: Fleet, replica: int, kill: Kill | None, world: tuple[int, str, int | None], settings: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(fleet.environment)
    salt, machine, file_bytes = world
    if machine:
        here = claims.this_process()
        claims.this_process = lambda: replace(here, host=machine, boot=machine)
    record, store, struck = fleet.record(replica), fleet.store, False
    resumed = record.exists()
    toy = Toy.load(replica, record) if resumed else Toy.fresh(replica)
    toy.salt = salt

    def there(key: str) -> bool:
        try:
            return bool(store.get(key))
        except ObjectMissing:
            return False

    def wait_for_others(key: Callable[[int], str]) -> None:
        for other in range(fleet.replicas):
            while other != replica and not there(key(other)):
                time.sleep(0.002)

    def trace(step: str) -> None:
        nonlocal struck
        if kill is not None and kill.last and step == "before:ready":
            wait_for_others(lambda other: keys.ready(toy.round, 0, other))
        if kill is not None and kill.last and step == "before:result":
            wait_for_others(keys.result)
        if kill is not None and not struck and step == kill.step and toy.round >= kill.round:
            struck = True
            os.kill(os.getpid(), kill.signal)

    ending: dict[str, Any] = {}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, hard))
    try:
        collective = ObjectStoreCollective(store, replica=replica, replicas=fleet.replicas, trace=trace, **settings)
        run_toy(toy, collective, fleet.rounds, resumed=resumed, save=record, trace=trace)
        ending = {"digest": toy.digest, "applied": toy.applied, "requests": dict(collective.requests)}
    except Exception as error:
        ending = {"error": type(error).__name__, "text": str(error), "applied": toy.applied}
        sys.exit(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        (fleet.folder / f"ended-{replica}.json").write_text(json.dumps(ending))


def join(process: BaseProcess, seconds: float = 60.0) -> int:
    process.join(timeout=seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError("a replica hung")
    return process.exitcode
