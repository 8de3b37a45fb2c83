"""The callback gives what a hand-written loop over OuterLoop gives, and what plain training gives where it must."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from composer_replication.autoloco import AutoLoCoConfig, FixedPolicy, make_policy
from composer_replication.autoloco.config import OuterConfig
from composer_replication.diloco.loop import OuterLoop
from composer_replication.preview import LoopPosition, Previewer, Scheduled
from tests.lightning.helpers import Numbered, Tiny, assert_same_bits, callback, in_threads, loader, trainer, weights


def by_hand(replica: int, collective: Any, *, policy: Any, replicas: int, count: int, **model: Any) -> dict[str, Any]:
    module = Tiny(**model)
    made = module.configure_optimizers()
    optimizer, scheduler = (made[0][0], made[1][0]["scheduler"]) if isinstance(made, tuple) else (made, None)
    schedulers = [Scheduled(scheduler=scheduler)] if scheduler is not None else []
    previewer = Previewer(optimizer, schedulers)
    sampler = DistributedSampler(Numbered(count), replicas, replica)  # shuffles, as Lightning does
    batches = list(DataLoader(Numbered(count), batch_size=2, sampler=sampler))
    loop = OuterLoop(module, collective, policy=policy, outer=OuterConfig(), settings={"data_seed": 0})

    def preview(done: int) -> Any:
        where = LoopPosition(batches_per_epoch=len(batches), batch=done)
        return previewer.take(where, grid=loop.grid, remaining=len(batches) - done).preview

    loop.start(preview(0))
    for done, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        nn.functional.mse_loss(module.net(batch["x"]), batch["y"]).backward()
        loop.before_step()
        lr = optimizer.param_groups[0]["lr"]
        optimizer.step()
        loop.step_done(lr, tokens=batch["x"].shape[0])
        if scheduler is not None:
            scheduler.step()
        if done == len(batches):
            loop.finish(preview(done))
        elif loop.due:
            loop.close_interval(preview(done))
    return weights(module)


def with_trainer(replica: int, collective: Any, *, policy: Any, count: int, **model: Any) -> dict[str, Any]:
    module = Tiny(**model)
    ours = callback(collective, policy=policy, base_horizon=None, token_fn=lambda batch: batch["x"].shape[0])
    trainer(ours, max_epochs=1).fit(module, loader(count, batch_size=2))
    return weights(module)


def test_the_callback_is_the_hand_written_loop_bit_for_bit() -> None:
    for policy in (FixedPolicy(horizon=4), make_policy("autoloco", AutoLoCoConfig(base_horizon=3, horizon_step=1))):
        for model in ({"optimizer": "sgd"}, {"optimizer": "adamw", "scheduler": True, "lr": 0.01}):
            plain = in_threads(
                2,
                lambda i, c: by_hand(i, c, policy=policy, replicas=2, count=84, seed=i, **model),  # noqa: B023
            )
            ours = in_threads(2, lambda i, c: with_trainer(i, c, policy=policy, count=84, seed=i, **model))  # noqa: B023
            assert_same_bits(plain[0], plain[1], ours[0], ours[1])


def test_one_replica_with_no_outer_optimizer_is_plain_training() -> None:
    def replica(_: int, collective: Any) -> dict[str, Any]:
        module = Tiny(optimizer="adamw", scheduler=True)
        ours = callback(collective, outer_lr=1.0, outer_momentum=0.0)
        trainer(ours, max_epochs=2, strategy="auto").fit(module, loader(30, batch_size=2))
        return weights(module)

    plain = Tiny(optimizer="adamw", scheduler=True)
    trainer(max_epochs=2, strategy="auto").fit(plain, loader(30, batch_size=2))
    ours = in_threads(1, replica)[0]
    for name, tensor in weights(plain).items():
        # anchor - (anchor - local) loses at most an ulp of the larger of the two in each of 8 rounds
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-6)
        assert not torch.equal(ours[name], weights(Tiny(seed=0))[name])
