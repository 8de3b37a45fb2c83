"""The ranks' channel, between real processes."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from composer_replication.diloco.ranks.channel import Ranks
from tests.support.ranks import World

pytestmark = pytest.mark.processes
PRELOAD = ["composer_replication.diloco.ranks.channel"]


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
