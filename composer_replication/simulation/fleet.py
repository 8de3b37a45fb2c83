"""All replicas of a recipe as threads of one process, each with an OuterLoop of its own.

Invariant: what comes out is what `launch` gives, to the last bit: the same initial weights, shards, batches, rounds and
codecs. What isn't simulated is time (see `timing.py`) and failure.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from composer_replication.adapter.interval import Interval
from composer_replication.adapter.tokens import count_tokens
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
from composer_replication.tasks import STREAMS
from composer_replication.tasks.next_token import logits_of, next_token_loss, target_count

__all__ = ["Disturbance", "SimulatedRun", "simulate"]

Told = Callable[[RoundSummary], None]


class Disturbance(Protocol):
    """Something that happens to a fleet in the middle of a run, which no schedule announces."""

    def batch(self, replica: int, step: int, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What `replica` trains on in inner step `step` (from 0) instead of `batch`."""
        ...

    def rate(self, replica: int, step: int) -> float:
        """By what the learning rate of that step is multiplied; 1.0 leaves it alone."""
        ...


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
    disturbance: str | None = None  # the name of its kind

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
    recipe: Recipe,
    *,
    replicas: int | None = None,
    seed: int | None = None,
    told: Told | None = None,
    disturbance: Disturbance | None = None,
) -> SimulatedRun:
    """Train the recipe's fleet to its end in this process, on the CPU.

    `replicas` and `seed` go over the recipe's. `told` is called with each round as replica 0 closes it. Raises
    RecipeError for what can't be simulated, and whatever rounds raise.
    """
    recipe = as_simulated(recipe, replicas, seed)
    count, data = recipe.fleet.replicas, build_data(recipe)
    fleet = InProcessFleet(count, codec=recipe.codec, timeout_seconds=86400.0, guards=guards_of(recipe))
    turn = threading.Lock()
    members = [
        _Replica(recipe, index, data, one, turn, told, disturbance) for index, one in enumerate(fleet.collectives())
    ]
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
        seed=recipe.training.seed,
        policy=recipe.autoloco.policy,
        steps=recipe.training.steps,
        rounds=tuple(first.rounds),
        validation_loss=first.validation_loss(),
        digest=first.digest,
        elements=sum(p.numel() for p in first.model.parameters() if p.requires_grad),
        disturbance=None if disturbance is None else type(disturbance).__name__,
    )


def as_simulated(recipe: Recipe, replicas: int | None, seed: int | None) -> Recipe:
    """The recipe with these put over it. Raises RecipeError for what can't be simulated."""
    if replicas is not None:
        recipe = replace(recipe, fleet=replace(recipe.fleet, replicas=replicas))
    if seed is not None:
        recipe = replace(recipe, training=replace(recipe.training, seed=seed))
    if recipe.model.name is None or recipe.data.name is None:
        raise RecipeError("simulate takes built-in models and data (model.name, data.name); launch takes your own")
    if recipe.data.name in STREAMS:
        raise RecipeError(
            f"data.name: {recipe.data.name} are a stream, which simulate can't deal: text_lm reads them whole"
        )
    if recipe.training.precision != "32-true":
        raise RecipeError(f"training.precision: simulate trains in 32-true, not {recipe.training.precision!r}")
    if recipe.training.trainer_args:
        raise RecipeError("training.trainer_args: simulate has no Trainer that could take them: leave them out")
    if recipe.fleet.failure_policy != "strict":
        raise RecipeError("fleet.failure_policy: nothing fails in a simulation: leave it at strict")
    return recipe


def _check_repeatable(member: _Replica) -> None:
    """Replicas are threads, and threads draw from one generator: what a model draws would depend on who comes first."""
    model, batch = copy.deepcopy(member.model), next(shard_of(member.recipe, member.data, member.index))
    before = torch.get_rng_state()
    with torch.no_grad():
        logits_of(model, batch)
    if not torch.equal(torch.get_rng_state(), before):
        raise RecipeError(
            "model.args: the model draws random numbers as it trains (dropout), which simulate can't give each replica "
            "as a process of its own has them: set it to 0"
        )


class _Replica:
    """One member of the fleet. Replicas train an interval in turn, as threads that all compute at once hinder one
    another; they meet at the rounds."""

    def __init__(
        self,
        recipe: Recipe,
        index: int,
        data: Any,
        collective: InProcessCollective,
        turn: threading.Lock,
        told: Told | None,
        disturbance: Disturbance | None,
    ) -> None:
        self.recipe, self.index, self.data = recipe, index, data
        torch.manual_seed(recipe.training.seed)  # as in a process of its own
        self.model = build_model(recipe)
        self.optimizer = optimizer_maker(recipe)(self.model)
        self.scheduler = scheduler_maker(recipe)(self.optimizer)
        self.rounds: list[RoundSummary] = []
        self.digest = ""
        self._turn, self._disturbance = turn, disturbance
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
            tell_times=False,  # replicas are threads, which keep one another waiting
        )

    def train(self) -> None:
        try:
            self._train()
        finally:
            self.loop.close()

    def _train(self) -> None:
        steps, batches = self.recipe.training.steps, shard_of(self.recipe, self.data, self.index)
        interval, done = Interval(), 0
        self.loop.start(self._preview(0))
        while done < steps:
            with self._turn:
                while done < steps and not self.loop.due:
                    self._step(done, batches, interval)
                    done += 1
                told = {"loss": loss} if (loss := interval.metrics(None).get("loss")) is not None else {}
                interval.reset()
                preview = self._preview(done)
            self._closed(self.loop.close_interval(preview, leaving=done == steps, metrics=told))
        self.digest = self.loop.finish(self._preview(done)).digest

    def _step(self, done: int, batches: Iterator[Mapping[str, Tensor]], interval: Interval) -> None:
        settings, tokens, disturbance = self.recipe.training, 0, self._disturbance
        self.optimizer.zero_grad()
        for _ in range(settings.accumulate):
            batch = next(batches)
            if disturbance is not None:
                batch = disturbance.batch(self.index, done, batch)
            loss = next_token_loss(logits_of(self.model, batch), batch["labels"])
            (loss / settings.accumulate).backward()
            interval.batch(loss)
            tokens += int(count_tokens(batch))
        clip_gradients(self.recipe, self.optimizer)
        self.loop.before_step()
        groups = self.optimizer.param_groups
        scheduled = [group["lr"] for group in groups]
        if disturbance is not None:
            for group in groups:
                group["lr"] = group["lr"] * disturbance.rate(self.index, done)
        self.optimizer.step()
        rate = mean_rate(groups, group_weights(self.optimizer))
        for group, lr in zip(groups, scheduled, strict=True):
            group["lr"] = lr
        self.loop.step_done(rate, tokens=tokens)
        self.scheduler.step()

    def _closed(self, summary: RoundSummary) -> None:
        self.rounds.append(summary)
        if self._told is not None:
            self._told(summary)

    def _preview(self, done: int) -> Preview:
        remaining = self.recipe.training.steps - done
        return self._previewer.take(LoopPosition(batch=done), grid=self.loop.grid, remaining=remaining).preview

    def validation_loss(self) -> float:
        return validation_loss(self.model, self.data)


def shard_of(recipe: Recipe, data: Any, index: int) -> Iterator[Mapping[str, Tensor]]:
    """A replica's batches, epoch by epoch, in the order in which a Trainer's sampler gives them."""
    fleet, seed = recipe.fleet.replicas, recipe.training.seed
    sampler: Any = DistributedSampler(data.train, fleet, index, shuffle=True, seed=seed)
    loader: Any = DataLoader(data.train, data.batch_size, sampler=sampler, drop_last=True, collate_fn=data.collate)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def clip_gradients(recipe: Recipe, optimizer: torch.optim.Optimizer) -> None:
    if recipe.training.gradient_clip is not None:
        # In the optimizer's order, as a Trainer does: the norm's last bits depend on it.
        own = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(own, recipe.training.gradient_clip)


@torch.no_grad()
def validation_loss(model: nn.Module, data: Any) -> float:
    """Mean over all validation labels, in nats."""
    model.eval()
    total, labels = 0.0, 0
    for batch in data.val_dataloader():
        count = target_count(batch["labels"])
        total += float(next_token_loss(logits_of(model, batch), batch["labels"])) * count
        labels += count
    return total / labels
