"""A small fleet that trains to the end in a store: two replicas in threads, a model with tied and frozen parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from composer_replication.autoloco import FixedPolicy
from composer_replication.autoloco.values import Preview
from composer_replication.collective.object_store import ObjectStoreCollective
from composer_replication.diloco.loop import OuterLoop
from composer_replication.store import ObjectStore
from tests.support.threads import run_threads


class Model(nn.Module):
    """An embedding that is also the head (tied), a layer in bfloat16, batch statistics, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.middle = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(8)
        self.base = nn.Linear(8, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight
        self.base.requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=generator)
            self.base.weight.fill_(0.5)
            self.base.bias.zero_()


def train(
    store: ObjectStore | str,
    *,
    rounds: int,
    replicas: int = 2,
    model: Callable[[], nn.Module] = Model,
    stop_after: int | None = None,
    **settings: Any,
) -> list[dict[str, Tensor]]:
    """Gives what replica 0's model holds of the shared weights at the start of each round, and at the end.

    With `stop_after` all stop after so many rounds, as if they were killed between two of them.
    """
    histories = run_threads(
        [partial(_replica, i, store, replicas, rounds, model, stop_after, settings) for i in range(replicas)]
    )
    return histories[0]


def _replica(
    replica: int,
    store: ObjectStore | str,
    replicas: int,
    rounds: int,
    make: Callable[[], nn.Module],
    stop_after: int | None,
    settings: dict[str, Any],
) -> list[dict[str, Tensor]]:
    module = make()
    policy = FixedPolicy(horizon=1)
    options = {"poll_seconds": 0.002, "max_poll_seconds": 0.02, "heartbeat_seconds": 60.0, **settings}
    collective = ObjectStoreCollective(store, replica=replica, replicas=replicas, **options)
    loop = OuterLoop(module, collective, policy=policy, chunk_elements=4096)
    generator = torch.Generator().manual_seed(replica)
    seen: list[dict[str, Tensor]] = []

    def note() -> None:
        with loop.shared_weights():
            seen.append({name: tensor.clone() for name, tensor in module.state_dict().items()})

    def preview(remaining: int) -> Preview:
        return Preview(steps=policy.grid, sums=(float(remaining > 0),), next_lr=1.0, remaining=remaining)

    loop.start(preview(rounds))
    note()
    for done in range(rounds):
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
        loop.step_done(1.0)
        loop.close_interval(preview(rounds - done - 1))
        note()
        if stop_after == done + 1:
            loop.close()
            return seen
    loop.finish(preview(0))
    note()
    loop.close()
    return seen
