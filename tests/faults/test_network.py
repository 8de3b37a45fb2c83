"""A network and a store that misbehave all along, under a fleet of which one replica is killed and restarted: the bits
of an undisturbed run. Where a store is away for long, the fleet's clock is fast: minutes pass in seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer_replication.errors import StoreUnavailable
from composer_replication.store import RemoteStore
from composer_replication.store.retry import Retry
from tests.collective.object_store.toy import Toy
from tests.faults.fleet import Fleet, Killed, Life, nothing_lost
from tests.faults.registry import Case, covers
from tests.support.fault_proxy import FaultProxy
from tests.support.servers import AZURITE_ACCOUNT

pytestmark = [
    pytest.mark.servers,
    # Connections that were cut on purpose are closed when they are collected, on a busy machine after the proxy's end.
    pytest.mark.filterwarnings("ignore:Exception ignored:pytest.PytestUnraisableExceptionWarning"),
]

Through = Callable[[str], tuple[FaultProxy, Callable[[Retry], RemoteStore]]]
SPEED = 10.0  # seconds of a fast fleet in one of ours
QUICK = Retry(seconds=60.0, first_pause_seconds=0.02, max_pause_seconds=0.5)
FAST = Retry(seconds=90.0, clock=lambda: fast_clock(), sleep=lambda seconds: fast_sleep(seconds))
# A minute's absence is a few seconds here, in which a busy machine loses as many.
PATIENT = Retry(seconds=300.0, clock=lambda: fast_clock(), sleep=lambda seconds: fast_sleep(seconds))
SERVERS = {"s3": "seaweedfs", "gcs": "fake_gcs", "azure": "azurite"}
ACTIONS: dict[str, dict[str, Any]] = {
    "delayed": {"action": "delay", "seconds": 0.05},
    "throttled (429)": {"action": "status", "status": 429},
    "throttled (503)": {"action": "status", "status": 503},
    "failing (500)": {"action": "status", "status": 500, "code": "InternalError"},
    "refused": {"action": "refuse"},
    "request cut midway": {"action": "cut request"},
    "answer cut midway": {"action": "cut answer"},
    "answer lost": {"action": "lose answer"},
    "listing stale": {"action": "stale listing", "chance": 1.0},
}


def fast_clock() -> float:
    return time.monotonic() * SPEED


def fast_sleep(seconds: float) -> None:
    time.sleep(seconds / SPEED)


@pytest.fixture
def through(request: pytest.FixtureRequest, uri_on: Callable[[str], str]) -> Through:
    """A proxy before the named server, and what opens a store through it."""

    def make(store: str) -> tuple[FaultProxy, Any]:
        server = SERVERS[store]
        where, uri, options = request.getfixturevalue(server), uri_on(server), {}
        upstream = where if store != "azure" else where.partition("BlobEndpoint=")[2].rstrip(";")
        proxy = FaultProxy(upstream).__enter__()
        request.addfinalizer(lambda: proxy.__exit__())
        if store == "azure":
            options = {"connection_string": where.replace(upstream, f"{proxy.endpoint}/{AZURITE_ACCOUNT}")}
        else:
            uri = uri.replace(where, proxy.endpoint)

        opened: dict[Retry, RemoteStore] = {}

        def open_it(retry: Retry) -> RemoteStore:
            if retry not in opened:
                opened[retry] = RemoteStore(uri, options=options, retry=retry)
                opened[retry].list("")  # the first contact has a limit of its own
            return opened[retry]

        return proxy, open_it

    return make


def fast_fleet(folder: Path, stores: Any, case: Case, retry: Retry = FAST, **settings: Any) -> Fleet:
    """With the times of a real one."""
    times = {"timeout_seconds": 600.0, "takeover_seconds": 30.0, "poll_seconds": 0.2, "max_poll_seconds": 1.0}
    clock = {"clock": fast_clock, "sleep": fast_sleep, "heartbeat_seconds": 0.5}
    return Fleet(
        folder, lambda _: stores(retry), policy=case.policy, replicas=2, rounds=3, **{**times, **clock, **settings}
    )


def kill_one(at: str, round: int) -> Callable[[str, Toy], None]:
    def hook(step: str, toy: Toy) -> None:
        if step == at and toy.round == round:
            raise Killed

    return hook


@covers("bad network")
def test_a_bad_network(case: Case, tmp_path: Path, through: Through) -> None:
    proxy, stores = through(case.store)
    stores(QUICK)
    fleet = Fleet(tmp_path, lambda _: stores(QUICK), policy=case.policy, replicas=2, rounds=2, poll_seconds=0.01)
    fault = proxy.add(**{"times": 10**6, "chance": 0.25, **ACTIONS[case.point]})
    other, first = fleet.start(0), fleet.start(1, kill_one("after:ready", 1)).join()
    assert first.killed, first.text
    lives = [fleet.start(1, salt=1).join(), other.join()]
    assert [life.text for life in lives] == ["", ""]
    assert fault.hits >= (2 if case.point == "listing stale" else 20), "that was no bad network"
    proxy.faults.clear()
    assert len(nothing_lost(stores(QUICK), [first, *lives])) == 2


@covers("away for a minute")
def test_the_store_is_away_for_a_minute(case: Case, tmp_path: Path, through: Through) -> None:
    proxy, stores = through(case.store)

    once = threading.Lock()  # chunks, shards and replicas each come to this step

    def leave(step: str, toy: Toy) -> None:
        if step == case.point and toy.round == 1 and once.acquire(blocking=False):
            proxy.away = True
            threading.Timer(60.0 / SPEED, lambda: setattr(proxy, "away", False)).start()

    began = fast_clock()
    lives = fast_fleet(tmp_path, stores, case, PATIENT).run({0: leave, 1: leave})  # a roster is written by one of them
    assert [life.text for life in lives] == ["", ""]
    assert fast_clock() - began >= 60.0
    assert len(nothing_lost(stores(QUICK), lives)) == 3


@covers("away for an hour")
def test_the_store_is_away_for_too_long(case: Case, tmp_path: Path, through: Through) -> None:
    """Everyone stops, and says why. When it is back, the fleet is started again and ends with the right bits."""
    proxy, stores = through(case.store)

    def leave(step: str, toy: Toy) -> None:
        if step == case.point and toy.round == 1:
            proxy.away = True

    fleet = fast_fleet(tmp_path, stores, case)
    first: list[Life] = fleet.run({0: leave, 1: leave})  # whoever comes there first: a roster is written by one
    for life in first:
        assert isinstance(life.error, StoreUnavailable) and "can't be reached" in life.text, life.text
    proxy.away = False
    again = fleet.run(salt=1)
    assert [life.text for life in again] == ["", ""]
    assert len(nothing_lost(stores(QUICK), [*first, *again])) == 3
