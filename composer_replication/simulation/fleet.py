"""All replicas of a recipe as threads of one process, each with an OuterLoop of its own.

Invariant: what comes out is what `launch` gives, to the last bit: the same initial weights, shards, batches, rounds and
codecs. What isn't simulated is time (see `timing.py`) and failure.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from composer_replication.adapter.interval import Interval
from composer_replication.autoloco.values import Preview
from composer_replication.collective.in_process import InProcessCollective, InProcessFleet
from composer_replication.diloco.loop import OuterLoop
from composer_replication.diloco.serverless.components import (
    build_data,
    build_model,
    optimizer_maker,
    scheduler_maker,
)
from composer_replication.diloco.summary import RoundSummary
from composer_replication.errors import RecipeError
from composer_replication.preview import LoopPosition, Previewer, Scheduled, group_weights, mean_rate
from composer_replication.recipe import Recipe, outer_config, policy_of
from composer_replication.recipe.settings import guards_of
from composer_replication.tasks.next_token import logits_of, next_token_loss

__all__ = ["SimulatedRun", "simulate"]

Told = Callable[[RoundSummary], None]


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """How a simulated fleet ended. `rounds` are as replica 0 saw them."""

    replicas: int
    seed: int
    policy: str
    steps: int
    rounds: tuple[RoundSummary, ...]
    validation_loss: float  # of the shared weights, in nats per label
    digest: str
    elements: int  # of the shared tensors

    @property
    def bytes_sent(self) -> int:
        """By replica 0, in all rounds."""
        return sum(one.bytes_sent for one in self.rounds)


class _Shared(nn.Module):
    """Gives the model's tensors the names that they have under a trainer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def simulate(
    recipe: Recipe, *, replicas: int | None = None, seed: int | None = None, told: Told | None = None
) -> SimulatedRun:
    """Train the recipe's fleet to its end in this process, on the CPU.

    `replicas` and `seed` go over the recipe's. `told` is called with each round as replica 0 closes it. Raises
    RecipeError for what can't be simulated, and whatever rounds raise.
    """
    count = recipe.fleet.replicas if replicas is None else replicas
    start = recipe.training.seed if seed is None else seed
    recipe = replace(recipe, training=replace(recipe.training, seed=start), fleet=replace(recipe.fleet, replicas=count))
    _check(recipe)
    data = build_data(recipe)
    fleet = InProcessFleet(count, codec=recipe.codec, timeout_seconds=3600.0, guards=guards_of(recipe))
    members = [_Replica(recipe, index, data, one, told) for index, one in enumerate(fleet.collectives())]
    _check_repeatable(members[0])
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(member.train) for member in members]
    problems = [future.exception() for future in futures]
    for problem in problems:
        if problem is not None:
            raise problem
    first = members[0]
    digests = {member.digest for member in members}
    assert len(digests) == 1, "replicas ended with different weights"
    return SimulatedRun(
        replicas=count,
        seed=start,
        policy=recipe.autoloco.policy,
        steps=recipe.training.steps,
        rounds=tuple(first.rounds),
        validation_loss=first.validation_loss(),
        digest=first.digest,
        elements=sum(p.numel() for p in first.model.parameters() if p.requires_grad),
    )


def _check(recipe: Recipe) -> None:
    if recipe.model.name is None or recipe.data.name is None:
        raise RecipeError("simulate takes built-in models and data (model.name, data.name); launch takes your own")
    if recipe.training.precision != "32-true":
        raise RecipeError(f"training.precision: simulate trains in 32-true, not {recipe.training.precision!r}")
    if recipe.training.trainer_args:
        raise RecipeError("training.trainer_args: simulate has no Trainer that could take them: leave them out")
    if recipe.fleet.failure_policy != "strict":
        raise RecipeError("fleet.failure_policy: nothing fails in a simulation: leave it at strict")


def _check_repeatable(member: _Replica) -> None:
    """Replicas are threads, and threads draw from one generator: what a model draws would depend on who comes first."""
    model, batch = copy.deepcopy(member.model), next(member.batches())
    before = torch.get_rng_state()
    with torch.no_grad():
        logits_of(model, batch)
    if not torch.equal(torch.get_rng_state(), before):
        raise RecipeError(
            "model.args: the model draws random numbers as it trains (dropout), which simulate can't give each replica "
            "as a process of its own has them: set it to 0"
        )


class _Replica:
    def __init__(
        self, recipe: Recipe, index: int, data: Any, collective: InProcessCollective, told: Told | None
    ) -> None:
        self.recipe, self.index, self.data = recipe, index, data
        torch.manual_seed(recipe.training.seed)  # as in a process of its own
        self.model = build_model(recipe)
        self.optimizer = optimizer_maker(recipe)(self.model)
        self.scheduler = scheduler_maker(recipe)(self.optimizer)
        self.rounds: list[RoundSummary] = []
        self.digest = ""
        self._told = told if index == 0 else None
        self._previewer = Previewer(self.optimizer, [Scheduled(scheduler=self.scheduler)])
        section = recipe.autoloco
        self.loop = OuterLoop(
            _Shared(self.model),
            collective,
            policy=policy_of(recipe),
            outer=outer_config(recipe),
            buffers=section.buffers,  # type: ignore[arg-type]  # checked with the recipe
            weighting=section.weighting,  # type: ignore[arg-type]
        )

    def train(self) -> None:
        try:
            self._train()
        finally:
            self.loop.close()

    def _train(self) -> None:
        settings, batches, weights = self.recipe.training, self.batches(), group_weights(self.optimizer)
        interval, tokens = Interval(), 0
        self.loop.start(self._preview(0))
        for done in range(1, settings.steps + 1):
            self.optimizer.zero_grad()
            for _ in range(settings.accumulate):
                batch = next(batches)
                loss = next_token_loss(logits_of(self.model, batch), batch["labels"])
                (loss / settings.accumulate).backward()
                interval.batch(loss)
                tokens += batch["input_ids"].numel()
            if settings.gradient_clip is not None:
                # In the optimizer's order, as a Trainer does: the norm's last bits depend on it.
                own = [p for group in self.optimizer.param_groups for p in group["params"]]
                nn.utils.clip_grad_norm_(own, settings.gradient_clip)
            self.loop.before_step()
            self.optimizer.step()
            rate = mean_rate(self.optimizer.param_groups, weights)
            self.loop.step_done(rate, tokens=tokens)
            self.scheduler.step()
            tokens = 0
            if done == settings.steps or self.loop.due:
                told = interval.metrics(None)
                interval.reset()
                self._close(done, told, last=done == settings.steps)

    def _close(self, done: int, told: dict[str, float], *, last: bool) -> None:
        self._closed(self.loop.close_interval(self._preview(done), leaving=last, metrics=told))
        if last:
            self.digest = self.loop.finish(self._preview(done)).digest

    def _closed(self, summary: RoundSummary) -> None:
        self.rounds.append(summary)
        if self._told is not None:
            self._told(summary)

    def _preview(self, done: int) -> Preview:
        remaining = self.recipe.training.steps - done
        return self._previewer.take(LoopPosition(batch=done), grid=self.loop.grid, remaining=remaining).preview

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """This replica's shard, epoch by epoch, in the order in which a Trainer's sampler gives it."""
        fleet, seed = self.recipe.fleet.replicas, self.recipe.training.seed
        sampler: Any = DistributedSampler(self.data.train, fleet, self.index, shuffle=True, seed=seed)
        loader: Any = DataLoader(self.data.train, self.data.batch_size, sampler=sampler, drop_last=True)
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            yield from loader
            epoch += 1

    @torch.no_grad()
    def validation_loss(self) -> float:
        self.model.eval()
        total, windows = 0.0, 0
        for batch in self.data.val_dataloader():
            size = batch["input_ids"].shape[0]
            total += float(next_token_loss(logits_of(self.model, batch), batch["labels"])) * size
            windows += size
        return total / windows
