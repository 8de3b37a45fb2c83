"""A small fleet in a store that goes on one round at a time, when it is told to: two replicas, the adaptive policy."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from composer_replication.autoloco import AutoLoCoPolicy
from composer_replication.autoloco.config import AutoLoCoConfig
from composer_replication.autoloco.values import Preview
from composer_replication.collective.object_store import ObjectStoreCollective
from composer_replication.diloco.loop import OuterLoop
from composer_replication.diloco.summary import RoundSummary
from tests.support.threads import run_threads

POLICY = AutoLoCoPolicy(config=AutoLoCoConfig(base_horizon=4, warmup_steps=4))


class SteppedFleet:
    """`round()` trains an interval on every replica and closes it."""

    def __init__(self, place: str, *, steps: int = 60, replicas: int = 2, **settings: Any) -> None:
        self.replicas = [_Replica(place, i, replicas, steps, settings) for i in range(replicas)]
        run_threads([one.start for one in self.replicas])

    def round(self) -> RoundSummary:
        return run_threads([one.interval for one in self.replicas])[0]

    def finish(self) -> None:
        run_threads([one.finish for one in self.replicas])

    def close(self) -> None:
        for one in self.replicas:
            one.loop.close()


class _Replica:
    def __init__(self, place: str, replica: int, replicas: int, steps: int, settings: dict[str, Any]) -> None:
        self.left, self.replica = steps, replica
        self.generator = torch.Generator().manual_seed(replica)
        self.model = nn.Linear(16, 16)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(0.5)
        options = {"poll_seconds": 0.002, "max_poll_seconds": 0.02, "heartbeat_seconds": 60.0, **settings}
        collective = ObjectStoreCollective(place, replica=replica, replicas=replicas, **options)
        self.loop = OuterLoop(self.model, collective, policy=POLICY)

    def start(self) -> None:
        self.loop.start(self._preview())

    def interval(self) -> RoundSummary:
        while not self.loop.due and self.left:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.add_(0.02 + 0.01 * torch.randn(parameter.shape, generator=self.generator))
            self.loop.step_done(0.1, tokens=8)
            self.left -= 1
        told = {"loss": 1.0 + self.left / 60 + 0.1 * self.replica, "train_seconds": 2.0 + self.replica}
        return self.loop.close_interval(self._preview(), leaving=not self.left, metrics=told)

    def finish(self) -> None:
        while not self.loop.left and self.left:
            self.interval()
        self.loop.finish(self._preview())
        self.loop.close()

    def _preview(self) -> Preview:
        sums = tuple(0.1 * min(steps, self.left) for steps in POLICY.grid)
        return Preview(steps=POLICY.grid, sums=sums, next_lr=0.1, remaining=self.left)
