"""DiLoCo in small: which way the pseudo-gradient points, by our loop and by torchft's over our manager."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from composer_replication import FixedPolicy, InProcessFleet, OuterLoop
from composer_replication.autoloco import OuterConfig, Preview
from composer_replication.diloco import make_diloco_outer_loop
from composer_replication.diloco.outer_step import pseudo_gradient
from composer_replication.diloco.serverless import ObjectStoreManager

START = (0.0, 0.0)
LOCAL = ((1.0, -2.0), (3.0, -4.0))  # where the two replicas' training takes them
MEAN = (2.0, -3.0)


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(START))


def by_our_loop(collective: Any, net: Weights, rate: float) -> None:
    preview = Preview(steps=(1,), sums=(1.0,), next_lr=1.0, remaining=None)
    loop = OuterLoop(net, collective, policy=FixedPolicy(horizon=1), outer=OuterConfig(lr=rate, momentum=0.0))
    loop.start(preview)
    loop.before_step()
    with torch.no_grad():
        net.weight.copy_(torch.tensor(LOCAL[collective.replica]))
    loop.step_done(lr=1.0)
    loop.close_interval(preview, leaving=True)
    loop.finish(preview)
    loop.close()


def by_torchft(collective: Any, net: Weights, rate: float) -> None:
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    manager = ObjectStoreManager(collective)
    with make_diloco_outer_loop(manager, [net], inner, outer_lr=rate, outer_momentum=0.0, nesterov=False, sync_every=1):
        net.weight.grad = -torch.tensor(LOCAL[collective.replica])  # one step against it leads there
        inner.step()
    manager.shutdown()


def two_replicas(train: Callable[[Any, Weights, float], None], rate: float) -> list[list[float]]:
    nets = [Weights() for _ in LOCAL]
    errors: list[BaseException] = []

    def live(collective: Any, net: Weights) -> None:
        try:
            train(collective, net, rate)
        except BaseException as error:
            errors.append(error)

    collectives = InProcessFleet(2, timeout_seconds=60).collectives()
    threads = [threading.Thread(target=live, args=pair) for pair in zip(collectives, nets, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    return [net.weight.detach().tolist() for net in nets]


@pytest.mark.parametrize("way", ["ours", "torchft"])
def test_diloco_pseudogradient_sign_convention(way: str) -> None:
    """It is anchor minus local: an outer optimizer that descends along it moves the weights where training went.

    With outer rate 1 and no momentum that is the replicas' mean, with half the rate half the way there. The other sign
    would lead to minus that. All numbers are exact in float32.
    """
    anchor, local = torch.tensor(START), torch.tensor(MEAN)
    assert pseudo_gradient(anchor, local, torch.empty(2)).tolist() == [-2.0, 3.0]
    if way == "torchft":
        pytest.importorskip("torchft.local_sgd")
    train = by_our_loop if way == "ours" else by_torchft
    assert two_replicas(train, 1.0) == [list(MEAN)] * 2
    assert two_replicas(train, 0.5) == [[1.0, -1.5]] * 2
