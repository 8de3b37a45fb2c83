"""A fleet small enough to be killed hundreds of times: a few tensors, training that is a plain function of (replica,
round, weights), the outer step in two lines, and a durable record of its own after each round.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_replication.collective.base import Collective, Contribution, Report, RoundOutcome, Snapshot
from composer_replication.collective.layout import Layout, Slot
from composer_replication.collective.norms import square_norm
from composer_replication.errors import Diverged

LAYOUT = Layout((Slot("w", (40, 129), "torch.float32"), Slot("b", (), "torch.float32"), Slot("v", (4100,), "x")), 4096)


@dataclass
class Toy:
    """One replica's durable state, and what it does in a round."""

    replica: int
    layout: Layout = LAYOUT
    round: int = 0
    anchor: list[Tensor] = field(default_factory=list)
    momentum: list[Tensor] = field(default_factory=list)
    ended: bool = False
    applied: list[tuple[int, str]] = field(default_factory=list)  # round, digest after it
    controller: float = 0.0  # what the fleet decides by, made of norms
    salt: int = 0  # another one trains another way

    @classmethod
    def fresh(cls, replica: int, layout: Layout = LAYOUT) -> Toy:
        generator = torch.Generator().manual_seed(replica)  # unlike on every replica, as a forgotten seed would be
        anchor = [torch.randn(slot.elements, generator=generator) for slot in layout.slots]
        return cls(replica, layout, 0, anchor, [torch.zeros_like(tensor) for tensor in anchor])

    @property
    def digest(self) -> str:
        content = hashlib.sha256(f"{self.round} {self.controller.hex()}".encode())
        for tensor in (*self.anchor, *self.momentum):
            content.update(tensor.numpy().tobytes())
        return content.hexdigest()[:32]

    def snapshot(self) -> Snapshot:
        return Snapshot(
            round=self.round,
            layout=self.layout,
            anchor=self.anchor,
            momentum=self.momentum if self.round else (),
            state={"round": self.round, "controller": self.controller.hex()},
            digest=self.digest,
        )

    def adopt(self, snapshot: Snapshot) -> None:
        self.round = snapshot.round
        self.controller = float.fromhex(snapshot.state["controller"])
        self.anchor = [tensor.clone() for tensor in snapshot.anchor]
        self.momentum = [t.clone() for t in snapshot.momentum] or [torch.zeros_like(t) for t in self.anchor]
        if self.digest != snapshot.digest:
            raise Diverged(f"the state of round {snapshot.round} doesn't match its digest")

    def train(self) -> list[Tensor]:
        """An interval: what each tensor has moved by (anchor - local)."""
        generator = torch.Generator().manual_seed(1000 * (self.round + 1000 * self.salt) + self.replica)
        return [0.1 * torch.randn(t.numel(), generator=generator) + 0.01 * t for t in self.anchor]

    def contribution(self, *, leaving: bool = False, **changes: Any) -> Contribution:
        moved = self.train()

        def chunk(index: int) -> Tensor:
            parts = self.layout.chunks[index].parts
            return torch.cat([moved[part.slot][part.start : part.stop] for part in parts])

        values: dict[str, Any] = {
            "replica": self.replica,
            "steps": 10,
            "tokens": 100,
            "mass": 0.5,
            "square_norm": sum(square_norm(tensor) for tensor in moved),
            "finite": True,
            "leaving": leaving,
            "next_lr": 0.1,
            "preview": (1.0, 2.0),
            "remaining": None,
            "base": self.digest,
            "layout": self.layout.fingerprint,
        }
        return Contribution(self.round, Report(**(values | changes)), self.layout, chunk)

    def apply(self, outcome: RoundOutcome) -> None:
        assert outcome.round == self.round, "a round is applied once, and in order"
        if outcome.members:
            for index, chunk in enumerate(self.layout.chunks):
                mean, begin = torch.empty(chunk.elements), 0
                outcome.mean(index, mean)
                for part in chunk.parts:
                    step = mean[begin : begin + part.elements]
                    begin += part.elements
                    momentum = self.momentum[part.slot][part.start : part.stop]
                    momentum.mul_(0.9).add_(step)
                    self.anchor[part.slot][part.start : part.stop].sub_(momentum.mul(0.7))
        self.controller = 0.5 * self.controller + outcome.mean_square_norm
        self.round += 1
        self.ended = not outcome.expected_next
        self.applied.append((outcome.round, self.digest))

    # -- the durable record

    def save(self, path: Path) -> None:
        names = ("round", "anchor", "momentum", "ended", "controller")
        torch.save({name: getattr(self, name) for name in names}, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)

    @classmethod
    def load(cls, replica: int, path: Path, layout: Layout = LAYOUT) -> Toy:
        state = torch.load(path, weights_only=True)
        return cls(replica, layout, **state)


def run_toy(
    toy: Toy,
    collective: Collective,
    rounds: int,
    *,
    resumed: bool = False,
    save: Path | None = None,
    trace: Callable[[str], None] = lambda step: None,
) -> Toy:
    """The whole life of a replica: `rounds` rounds, the last one leaving; then follow to the fleet's end."""

    def applied(outcome: RoundOutcome) -> None:
        toy.apply(outcome)
        collective.applied(toy.snapshot)
        if save is not None:
            trace("before:record")
            toy.save(save)
            trace("after:record")

    try:
        got = collective.start(toy.snapshot(), settings={}, resumed=resumed)
        left = False
        if not resumed:
            toy.adopt(got)
            toy.ended = got.ended
        if save is not None and not save.exists():
            toy.save(save)
        if not resumed or collective.overtaken:
            while not toy.ended and (outcome := collective.follow(toy.round, toy.layout, toy.digest, wait=False)):
                applied(outcome)
        while not toy.ended:
            if left:
                outcome = collective.follow(toy.round, toy.layout, toy.digest, wait=True)
            else:
                mine = toy.contribution(leaving=toy.round >= rounds - 1)
                outcome = collective.average(mine)
                present = {report.replica for report in (*outcome.members, *outcome.others)}
                left = mine.report.leaving and toy.replica in present
            assert outcome is not None
            applied(outcome)
        collective.finish(toy.digest, {"rounds": toy.round})
    finally:
        collective.close()
    return toy
