"""One table of models and optimizers that every way of training must treat alike.

A case is a plain module with `loss(batch)`, told of each batch by `begin(number)`, and how it is optimized. Each
trainer wraps it as the attribute `core` of its own module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests.support.seeded import seeded

__all__ = ["CASES", "Case", "Plain"]


class Plain(nn.Module):
    """A small regression on batches with x (6 wide) and y (2 wide)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = seeded(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)), seed)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.net(batch["x"]), batch["y"])

    def begin(self, number: int) -> None:
        """Before batch `number`, from 0."""


class Thawing(Plain):
    """The first layer is frozen until batch 5."""

    def __init__(self, seed: int) -> None:
        super().__init__(0)
        self.net[0].requires_grad_(False)

    def begin(self, number: int) -> None:
        if number == 5:
            self.net[0].requires_grad_(True)


class Branching(Plain):
    """A branch never gets a gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.unused = seeded(nn.Linear(3, 3), seed + 100)


class Tied(Plain):
    """Two layers share one weight; BatchNorm has statistics and a counter of whole numbers."""

    def __init__(self, seed: int) -> None:
        super().__init__(0)
        self.norm, self.tied = nn.BatchNorm1d(6), seeded(nn.Linear(6, 6, bias=False), 0)
        self.also = nn.Linear(6, 6, bias=False)
        self.also.weight = self.tied.weight
        self.register_buffer("scratch", torch.full((2,), float(seed)), persistent=False)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.also(torch.tanh(self.tied(self.norm(batch["x"]))))
        return super().loss({**batch, "x": x})


class Narrow(nn.Module):
    """bfloat16 weights that a round moves by less than the distance between neighbours."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.weight.float().sum()

    def begin(self, number: int) -> None:
        """Nothing changes."""


class GoneBad(Plain):
    """Replica 1 finds a weight that isn't a number in its third batch."""

    def __init__(self, seed: int) -> None:
        super().__init__(0)
        self.bad = seed == 1

    def begin(self, number: int) -> None:
        if self.bad and number == 2:
            with torch.no_grad():
                self.net[0].weight[0, 0] = float("nan")


def _sgd(module: nn.Module) -> tuple[Any, Any]:
    return torch.optim.SGD(module.parameters(), lr=0.05), None


def _adamw(module: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    return optimizer, lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.1 * step))


def _groups(module: nn.Module) -> tuple[Any, Any]:
    net = module.core.net  # type: ignore[union-attr]
    groups = [{"params": net[0].parameters(), "lr": 0.1}, {"params": net[2].parameters(), "lr": 0.4}]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    return optimizer, lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.4], total_steps=50)


def _creeping(module: nn.Module) -> tuple[Any, Any]:
    return torch.optim.SGD(module.parameters(), lr=2.0**-8), None


@dataclass(frozen=True, kw_only=True)
class Case:
    make: Callable[[int], Any]  # of the replica's id
    optimize: Callable[[nn.Module], tuple[Any, Any]]  # (optimizer, scheduler for every batch or None)
    policy: str = "fixed"
    local: tuple[str, ...] = ()  # tensors that each replica keeps for itself
    warns: str = ""


CASES: dict[str, Case] = {
    "sgd": Case(make=Plain, optimize=_sgd),
    "adamw with a schedule": Case(make=Plain, optimize=_adamw),
    "autoloco": Case(make=Plain, optimize=_adamw, policy="autoloco"),
    "two groups": Case(make=Plain, optimize=_groups, policy="autoloco"),
    "thawing": Case(make=Thawing, optimize=_sgd),
    "a branch without gradients": Case(make=Branching, optimize=_adamw),
    "tied weights and statistics": Case(make=Tied, optimize=_sgd, local=("core.scratch",)),
    "narrow weights": Case(make=Narrow, optimize=_creeping),
    "gone bad": Case(make=GoneBad, optimize=_adamw, warns="weights weren't finite"),
}
