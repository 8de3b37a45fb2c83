"""The ranks' channel, between real processes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from composer_replication.autoloco import FixedPolicy
from composer_replication.collective.object_store import ObjectStoreCollective
from composer_replication.diloco.ranks.channel import Ranks
from composer_replication.diloco.ranks.loop import LeadingLoop
from composer_replication.store import MemoryStore
from tests.support.ranks import World

pytestmark = pytest.mark.processes
PRELOAD = ["composer_replication.diloco.ranks.loop", "composer_replication.collective.object_store"]


def close_early(rank: int) -> str:
    """Rank 0 closes while a message is under way, whose tensor nobody else holds any more."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    ranks, store = Ranks(), dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["closing"])
    dist.all_reduce(torch.ones(1), group=ranks._group, async_op=True)
    if rank == 0:
        store.set("closing", "now")
    ranks.close()
    return "closed"


def test_closing_waits_for_the_last_message_and_not_for_ever() -> None:
    assert World(PRELOAD, close_early, size=2).end(40) == {0: "closed", 1: "closed"}


class Unclosable(ObjectStoreCollective):
    def close(self) -> None:
        super().close()
        raise OSError("the disk is gone")


def close_badly(rank: int) -> list[Any]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    ranks = Ranks()
    model = torch.nn.Linear(2, 2)
    loop = LeadingLoop(model, Unclosable(MemoryStore(), replica=0, replicas=1), ranks, policy=FixedPolicy(horizon=1))
    try:
        loop.close()
    except OSError as error:
        return [str(error), ranks._group]
    return []


def test_a_collective_that_fails_to_close_leaves_no_group_open() -> None:
    assert World(PRELOAD, close_badly, size=1).end(40) == {0: ["the disk is gone", None]}
