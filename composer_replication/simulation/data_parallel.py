"""The same recipe as plain data parallelism: one model, gradients averaged over all shards in every step.

Invariant: the batches of each step are those that the replicas of the simulated fleet train on; nothing is
synchronised but gradients. What it is for: the loss that a fleet of replicas is measured against.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from composer_replication.diloco.serverless.components import (
    build_data,
    build_model,
    optimizer_maker,
    scheduler_maker,
)
from composer_replication.recipe import Recipe
from composer_replication.simulation.fleet import as_simulated, clip_gradients, shard_of, validation_loss
from composer_replication.tasks.next_token import logits_of, next_token_loss

__all__ = ["DataParallelRun", "simulate_data_parallel"]


@dataclass(frozen=True, kw_only=True)
class DataParallelRun:
    """How it ended. `losses`: mean training loss of each `base_horizon` steps (the last may be shorter)."""

    replicas: int
    seed: int
    steps: int
    losses: tuple[tuple[int, float], ...]  # (inner steps done, mean over these steps and all shards)
    validation_loss: float
    elements: int


def simulate_data_parallel(
    recipe: Recipe,
    *,
    replicas: int | None = None,
    seed: int | None = None,
    told: Callable[[int, float], None] | None = None,
) -> DataParallelRun:
    """Train the recipe's model with synchronous data parallelism, in this process, on the CPU.

    `told` is called with (steps done, mean loss) every base horizon. Raises RecipeError for what can't be simulated.
    """
    recipe = as_simulated(recipe, replicas, seed)
    settings, count, data = recipe.training, recipe.fleet.replicas, build_data(recipe)
    torch.manual_seed(settings.seed)
    model = build_model(recipe)
    optimizer = optimizer_maker(recipe)(model)
    scheduler = scheduler_maker(recipe)(optimizer)
    shards = [shard_of(recipe, data, index) for index in range(count)]
    share = 1.0 / (count * settings.accumulate)
    losses: list[tuple[int, float]] = []
    total, since = 0.0, 0
    for done in range(1, settings.steps + 1):
        optimizer.zero_grad()
        for shard in shards:
            for _ in range(settings.accumulate):
                batch = next(shard)
                loss = next_token_loss(logits_of(model, batch), batch["labels"])
                (loss * share).backward()
                total += float(loss) * share
        clip_gradients(recipe, optimizer)
        optimizer.step()
        scheduler.step()
        since += 1
        if since == recipe.autoloco.base_horizon or done == settings.steps:
            losses.append((done, total / since))
            if told is not None:
                told(*losses[-1])
            total, since = 0.0, 0
    return DataParallelRun(
        replicas=count,
        seed=settings.seed,
        steps=settings.steps,
        losses=tuple(losses),
        validation_loss=validation_loss(model, data),
        elements=sum(p.numel() for p in model.parameters() if p.requires_grad),
    )
