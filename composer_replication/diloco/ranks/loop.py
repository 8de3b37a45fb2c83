"""The outer loop of a replica of several processes: one leads, the others follow.

Invariant: the leading loop is an `OuterLoop` over the whole model; a following one mirrors it and decides nothing. Each
method is called on all ranks at the same point of training, and gives or raises the same on all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from composer_replication.autoloco.values import Plan, Policy, Preview
from composer_replication.collective.base import Collective, Contribution, Report, RoundOutcome, Snapshot
from composer_replication.collective.layout import Layout
from composer_replication.diloco.held import Held, reshard
from composer_replication.diloco.loop import OuterLoop
from composer_replication.diloco.loop_state import check_state
from composer_replication.diloco.ranks.channel import Ranks
from composer_replication.diloco.ranks.spread import Follower, holder, read_rows
from composer_replication.diloco.summary import FinalSummary, RoundSummary, StartSummary
from composer_replication.errors import RoundError

__all__ = ["FollowingLoop", "LeadingLoop", "Unheard", "make_loop"]

_STOP, _OVERTAKEN = 2, 1  # the greatest is what all ranks act on

Model = nn.Module | Mapping[str, Tensor]


def make_loop(
    model: Model, collective: Collective, ranks: Ranks | None, *, policy: Policy, **options: Any
) -> OuterLoop | FollowingLoop:
    """The loop of this process: of a replica that is one process, or of one of its ranks. Takes OuterLoop's options."""
    if ranks is None:
        return OuterLoop(model, collective, policy=policy, **options)
    if ranks.leads:
        return LeadingLoop(model, collective, ranks, policy=policy, **options)
    return FollowingLoop(model, collective, ranks, policy=policy, buffers=options.get("buffers", "average"))


class Unheard:
    """The collective of a rank that doesn't speak with the fleet: shows nobody anything."""

    def __init__(self, replica: int, fleet: tuple[int, ...]) -> None:
        self.replica, self.fleet, self.overtaken = replica, fleet, False

    def start(self, offered: Snapshot, *, settings: Mapping[str, Any], resumed: bool) -> Snapshot:
        raise AssertionError("only rank 0 of a replica joins the fleet")

    def average(self, contribution: Contribution) -> RoundOutcome:
        raise AssertionError("only rank 0 of a replica takes part in rounds")

    def follow(self, round: int, layout: Layout, base: str, *, wait: bool) -> RoundOutcome | None:
        raise AssertionError("only rank 0 of a replica takes part in rounds")

    def applied(self, take: Any) -> None: ...

    def publish(self, status: Mapping[str, Any]) -> None: ...

    def finish(self, digest: str, result: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class LeadingLoop(OuterLoop):
    """Rank 0's. The replica's tokens and metrics are those of all ranks; its steps, rates and buffers are rank 0's."""

    def __init__(self, model: Model, collective: Collective, ranks: Ranks, **options: Any) -> None:
        self._ranks, self._model = ranks, model
        self._rows = read_rows(model, options.get("buffers", "average") == "average", ranks)
        self._others_finite = True
        self._behind = False
        ranks.lead(lambda: super(LeadingLoop, self).__init__(model, collective, **options), lambda _: None)
        self._seen = self._tensors.trainable()

    def _hold(self, name: str, tensor: Tensor) -> Held:
        return holder(self._ranks, self._rows)(name, tensor)

    @property
    def overtaken(self) -> bool:
        """As of the last `watch`."""
        return self._behind

    def watch(self) -> bool:
        """After each batch: whether any rank was asked to stop; and so for `overtaken`."""
        flags = _STOP if self._ranks.told_to_stop() else _OVERTAKEN if super().overtaken else 0
        said = self._ranks.agree(flags)
        self._behind = said == _OVERTAKEN and self.started and not self.ended and not self.left
        return said == _STOP

    def start(self, preview: Preview) -> StartSummary:
        return self._lead(lambda: OuterLoop.start(self, preview))

    def before_step(self) -> None:
        if self._tensors.trainable() != self._seen:
            self._lead(lambda: OuterLoop.before_step(self))

    def close_interval(
        self, preview: Preview, *, leaving: bool = False, metrics: Mapping[str, float] | None = None
    ) -> RoundSummary:
        said = self._ranks.collect(_Part(self.steps, self._tokens, dict(metrics or {}), True))
        _check_steps(said)
        self._tokens = _sum_of_tokens(said)
        self._others_finite = all(part.finite for part in said)
        told = _combined([part.metrics for part in said])
        return self._lead(lambda: OuterLoop.close_interval(self, preview, leaving=leaving, metrics=told))

    def _report(self, layout: Layout, preview: Preview, leaving: bool, metrics: Mapping[str, float]) -> Report:
        report = super()._report(layout, preview, leaving, metrics)
        if self._others_finite:
            return report
        return dataclasses.replace(report, finite=False, square_norm=float("nan"))

    def finish(self, preview: Preview, *, metrics: Mapping[str, float] | None = None) -> FinalSummary:
        while not self.left and not self.ended:
            self.close_interval(preview, leaving=True, metrics=metrics)
        return self._lead(lambda: OuterLoop.finish(self, preview, metrics=metrics))

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        swap = OuterLoop.shared_weights(self)
        self._lead(swap.__enter__)
        try:
            yield
        finally:
            self._lead(lambda: swap.__exit__(None, None, None))

    def shared_weights(self) -> AbstractContextManager[None]:
        return self._swapped()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._ranks.close()

    def _lead(self, work: Any) -> Any:
        reshard(self._model)
        result = self._ranks.lead(work, lambda result: (self._mirror(), result))
        self._seen = self._tensors.trainable()
        return result

    def _mirror(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "position": self.position,
            "steps": self.steps,
            "plan": self._plan,
            "digest": self._digest,
            "ended": self.ended,
            "left": self.left,
            "intervals_lost": self.intervals_lost,
        }


class FollowingLoop:
    """That of any other rank: what a trainer's adapter asks of an `OuterLoop`, with rank 0's answers."""

    def __init__(self, model: Model, collective: Collective, ranks: Ranks, *, policy: Policy, buffers: str) -> None:
        average = buffers == "average"
        self._ranks, self._model = ranks, model
        self.collective = collective
        self.replica, self.fleet, self.grid = collective.replica, collective.fleet, policy.grid
        self._follower = Follower(model, average, ranks, read_rows(model, average, ranks))
        self.round, self.position, self.steps, self.digest = 0, 0, 0, ""
        self.ended, self.left, self.intervals_lost = False, False, 0
        self._plan: Plan | None = None
        self._tokens: int | None = 0
        self._behind = False
        self._loaded: int | None = 0
        ranks.serve(self._follower.handlers)
        self._seen = self._follower.trainable()

    @property
    def started(self) -> bool:
        return self._plan is not None and bool(self.digest)

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            raise RuntimeError("the loop has no plan before start()")
        return self._plan

    @property
    def due(self) -> bool:
        return self.started and not self.ended and not self.left and self.steps >= self.plan.steps

    @property
    def overtaken(self) -> bool:
        return self._behind

    def watch(self) -> bool:
        """As that of `LeadingLoop`."""
        said = self._ranks.agree(_STOP if self._ranks.told_to_stop() else 0)
        self._behind = said == _OVERTAKEN and self.started and not self.ended and not self.left
        return said == _STOP

    def start(self, preview: Preview) -> StartSummary:
        del preview  # rank 0's counts, here and below
        joined = self._follow()
        self._tokens = self._loaded
        return joined

    def before_step(self) -> None:
        if self._follower.trainable() != self._seen:
            self._follow()

    def step_done(self, lr: float, tokens: int | None = None) -> None:
        del lr
        self.steps += 1
        self.add_tokens(tokens)

    def add_tokens(self, tokens: int | None) -> None:
        self._tokens = None if tokens is None or self._tokens is None else self._tokens + tokens

    def close_interval(
        self, preview: Preview, *, leaving: bool = False, metrics: Mapping[str, float] | None = None
    ) -> RoundSummary:
        del preview, leaving
        part = _Part(self.steps, self._tokens, dict(metrics or {}), self._follower.finite())
        _check_steps(self._ranks.collect(part))
        summary = self._follow()
        self._tokens = 0
        return summary

    def finish(self, preview: Preview, *, metrics: Mapping[str, float] | None = None) -> FinalSummary:
        while not self.left and not self.ended:
            self.close_interval(preview, leaving=True, metrics=metrics)
        return self._follow()

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        self._follow()
        try:
            yield
        finally:
            self._follow()

    def shared_weights(self) -> AbstractContextManager[None]:
        return self._swapped()

    def state_dict(self) -> dict[str, Any]:
        """Of the interval only: the outer state is in rank 0's."""
        return {"interval": {"tokens": self._tokens}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, self.replica)
        self._loaded = state["interval"]["tokens"]

    def close(self) -> None:
        try:
            self.collective.close()
        finally:
            self._ranks.close()

    def _follow(self) -> Any:
        reshard(self._model)
        mirror, result = self._ranks.serve(self._follower.handlers)
        self.round, self.position, self.steps = mirror["round"], mirror["position"], mirror["steps"]
        self._plan, self.digest = mirror["plan"], mirror["digest"]
        self.ended, self.left, self.intervals_lost = mirror["ended"], mirror["left"], mirror["intervals_lost"]
        self._seen = self._follower.trainable()
        return result


@dataclasses.dataclass(frozen=True)
class _Part:
    """One rank's share of an interval."""

    steps: int
    tokens: int | None
    metrics: dict[str, float]
    finite: bool


def _check_steps(parts: list[_Part]) -> None:
    steps = [part.steps for part in parts]
    if len(set(steps)) > 1:
        raise RoundError(f"the ranks of this replica took different numbers of steps in one interval: {steps}")


def _sum_of_tokens(parts: list[_Part]) -> int | None:
    counts = [part.tokens for part in parts]
    return None if any(count is None for count in counts) else sum(count for count in counts if count is not None)


def _combined(metrics: list[dict[str, float]]) -> dict[str, float]:
    """The replica's metrics: the loss is the mean over its ranks, speeds add up, all else is rank 0's."""
    told = dict(metrics[0])
    losses = [one["loss"] for one in metrics if "loss" in one]
    if losses:
        told["loss"] = sum(losses) / len(losses)
    if "tokens_per_second" in told:
        told["tokens_per_second"] = sum(one.get("tokens_per_second", 0.0) for one in metrics)
    return told
