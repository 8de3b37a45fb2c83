"""The collective over torchft: its real lighthouse, managers and process groups, one replica a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composer_replication import FixedPolicy, OuterLoop
from composer_replication.autoloco import Preview
from composer_replication.collective.base import Contribution, RoundOutcome
from composer_replication.collective.guards import Guards
from composer_replication.collective.torchft_manager import TorchftCollective
from composer_replication.errors import RoundTimeout
from tests.collective import conformance
from tests.support.threads import run_threads

pytest.importorskip("torchft.coordination")
from torchft.coordination import LighthouseServer  # noqa: E402
from torchft.manager import Manager  # noqa: E402
from torchft.process_group import ProcessGroupGloo  # noqa: E402


class Gloo(ProcessGroupGloo):
    def _create_pg(self, *arguments: Any) -> Any:
        if not hasattr(dist.ProcessGroupGloo._Options, "global_ranks_in_group"):
            self._global_ranks = []  # a label for debugging, which torch has a place for since 2.8 only
        return super()._create_pg(*arguments)


class Place:
    """A lighthouse, and the managers that have registered with it."""

    def __init__(self, least: int) -> None:
        self.lighthouse = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=least, join_timeout_ms=300, heartbeat_timeout_ms=4000
        )
        self.managers: list[Manager] = []

    def manager(self, replica: int, least: int, **options: Any) -> Manager:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        seconds = timedelta(seconds=20)
        manager = Manager(
            **{"use_async_quorum": False, **options},
            pg=Gloo(timeout=seconds),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=least,
            timeout=seconds,
            quorum_timeout=seconds,
            connect_timeout=seconds,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=store.port,
            lighthouse_addr=self.lighthouse.address(),
            replica_id=f"replica{replica}",
            hostname="127.0.0.1",
        )
        manager.kept = store  # type: ignore[attr-defined]  # the store lives as long as its manager
        self.managers.append(manager)
        return manager

    def close(self) -> None:
        for manager in self.managers:
            manager.shutdown(wait=False)
        self.lighthouse.shutdown()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchft's variables count more than its arguments."""
    for name in ("TORCHFT_LIGHTHOUSE", "TORCHFT_TIMEOUT_SEC", "TORCHFT_QUORUM_TIMEOUT_SEC"):
        monkeypatch.delenv(name, raising=False)


def run(replicas: int, codec: str, script: Callable[[Any], Any], *, guards: Guards | None = None) -> list[Any]:
    place = Place(replicas)
    try:
        made = [
            TorchftCollective(
                place.manager(i, replicas),
                replica=i,
                replicas=replicas,
                codec=codec,
                guards=guards,
                timeout_seconds=20,
            )
            for i in range(replicas)
        ]
        return run_threads([partial(script, collective) for collective in made])
    finally:
        place.close()


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_conformance(check) -> None:
    check(run)


def test_a_replica_that_goes_is_done_without_and_comes_back() -> None:
    """Replica 2 goes away in the middle of round 1's exchange: the others average without it. It comes again with fresh
    weights, gets the others' state, and all end alike, one round after the first that has all three again."""
    place = Place(2)
    preview = Preview(steps=(2,), sums=(0.2,), next_lr=0.1, remaining=None)
    nets = []
    for seed in range(4):
        torch.manual_seed(seed)
        nets.append(nn.Linear(3, 1))

    class Gone(BaseException):
        pass

    # Else, if one of the two is slow to notice, the other one and who comes back are enough for a quorum without it.
    done_without = threading.Barrier(3)

    def life(replica: int, net: nn.Module, *, dies: bool = False) -> tuple[list[tuple[int, ...]], torch.Tensor]:
        manager = place.manager(replica, 2)
        collective = TorchftCollective(manager, replica=replica, replicas=3, timeout_seconds=40)
        loop = OuterLoop(net, collective, policy=FixedPolicy(horizon=2))
        loop.start(preview)
        if dies:
            average = collective.average

            def breaks(index: int) -> torch.Tensor:
                manager.shutdown(wait=False)
                manager._pg.abort()
                raise Gone

            def dying(contribution: Contribution) -> RoundOutcome:
                broken = replace(contribution, chunk=breaks)
                return average(broken if contribution.round == 1 else contribution)

            collective.average = dying  # type: ignore[method-assign]
        inner, seen = torch.optim.SGD(net.parameters(), lr=0.1), []
        while not loop.left:
            inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * replica + loop.round))
            (net(inputs) - inputs.sum()).square().mean().backward()
            inner.step()
            inner.zero_grad()
            loop.step_done(lr=0.1)
            if loop.due:
                complete_again = loop.round > 1 and bool(seen) and seen[-1] == (0, 1, 2)
                seen.append(loop.close_interval(preview, leaving=complete_again).members)
                if seen[-2:] == [(0, 1, 2), (0, 1)]:
                    done_without.wait(100)
        loop.finish(preview)
        manager.shutdown(wait=False)
        return seen, torch.cat([p.detach().reshape(-1) for p in net.parameters()])

    def twice() -> tuple[list[tuple[int, ...]], torch.Tensor]:
        with pytest.raises(Gone):
            life(2, nets[2], dies=True)
        done_without.wait(100)
        return life(2, nets[3])

    try:
        results = run_threads([partial(life, 0, nets[0]), partial(life, 1, nets[1]), twice], timeout_seconds=120)
    finally:
        place.close()
    (first, weights), (second, others), (third, returned) = results
    assert torch.equal(weights, others) and torch.equal(weights, returned)
    assert first == second and first[:2] == [(0, 1, 2), (0, 1)]
    assert first[-2:] == [(0, 1, 2)] * 2 and set(first[2:-2]) <= {(0, 1)}
    assert third == first[-2:]


def test_a_fleet_that_never_is_complete_says_so() -> None:
    place = Place(1)
    collective = TorchftCollective(place.manager(0, 1), replica=0, replicas=2, timeout_seconds=1.0)
    with pytest.raises(RoundTimeout, match="1 of 2 replicas"):
        conformance.begin(collective, conformance.SCALAR)
    place.close()


def test_misuse() -> None:
    place = Place(1)
    with pytest.raises(ValueError, match="use_async_quorum=False"):
        TorchftCollective(place.manager(0, 1, use_async_quorum=True), replica=0, replicas=1)
    manager = place.manager(1, 1)
    with pytest.raises(ValueError, match="replica"):
        TorchftCollective(manager, replica=2, replicas=2)
    with pytest.raises(ValueError, match="timeout_seconds"):
        TorchftCollective(manager, replica=0, replicas=2, timeout_seconds=0)
    place.close()
