"""The same model, data and settings give the same bits, whether Lightning, Composer or a hand-written loop trains."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytest.importorskip("composer")

import lightning.pytorch as pl
import torch
from composer.core import Event
from composer.models import ComposerModel
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from composer_replication.autoloco import AutoLoCoConfig, FixedPolicy, make_policy
from composer_replication.composer import AutoLoCo, replica_sampler
from composer_replication.diloco.loop import OuterLoop
from composer_replication.diloco.repair import repair_optimizer_state
from composer_replication.lightning import AutoLoCoCallback
from composer_replication.preview import LoopPosition, Previewer, Scheduled
from tests.composer.helpers import At, assert_same_bits, in_threads, train, weights
from tests.lightning.helpers import Numbered
from tests.lightning.helpers import trainer as lightning_trainer
from tests.support.cases import CASES, Case

SAMPLES = 84  # 21 batches of 2 for each of two replicas


def policy_of(case: Case) -> Any:
    if case.policy == "fixed":
        return FixedPolicy(horizon=4)
    return make_policy("autoloco", AutoLoCoConfig(base_horizon=3, horizon_step=1))


def count(batch: dict[str, Tensor]) -> int:
    return batch["x"].shape[0]


class ByHand(nn.Module):
    def __init__(self, core: Any) -> None:
        super().__init__()
        self.core = core


def with_a_loop(case: Case, replica: int, collective: Any) -> nn.Module:
    module = ByHand(case.make(replica))
    optimizer, scheduler = case.optimize(module)
    previewer = Previewer(optimizer, [Scheduled(scheduler=scheduler)] if scheduler is not None else [])
    sampler = DistributedSampler(Numbered(SAMPLES), 2, replica)
    batches = list(DataLoader(Numbered(SAMPLES), batch_size=2, sampler=sampler))
    loop = OuterLoop(module, collective, policy=policy_of(case), settings={"data_seed": 0})

    def preview(done: int) -> Any:
        where = LoopPosition(batches_per_epoch=len(batches), batch=done)
        return previewer.take(where, grid=loop.grid, remaining=len(batches) - done).preview

    loop.start(preview(0))
    for number, batch in enumerate(batches):
        module.core.begin(number)
        optimizer.zero_grad()
        module.core.loss(batch).backward()
        loop.before_step()
        # with several groups, the mean by elements
        sizes = [sum(p.numel() for p in group["params"] if p.requires_grad) for group in optimizer.param_groups]
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        optimizer.step()
        same = all(rate == rates[0] for rate in rates)
        mean = rates[0] if same else sum(a * b for a, b in zip(sizes, rates, strict=True)) / sum(sizes)
        loop.step_done(mean, tokens=count(batch))
        if scheduler is not None:
            scheduler.step()
        if number + 1 == len(batches):
            loop.finish(preview(number + 1))
        elif loop.due and loop.close_interval(preview(number + 1)).restored:
            repair_optimizer_state(optimizer)
    return module


class ForLightning(pl.LightningModule):
    def __init__(self, case: Case, replica: int) -> None:
        super().__init__()
        self.case, self.core = case, case.make(replica)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.core.loss(batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.core.begin(batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = self.case.optimize(self)
        return optimizer if scheduler is None else ([optimizer], [{"scheduler": scheduler, "interval": "step"}])


def with_lightning(case: Case, replica: int, collective: Any) -> nn.Module:
    module = ForLightning(case, replica)
    ours = AutoLoCoCallback(collective=collective, policy=policy_of(case), token_fn=count)
    lightning_trainer(ours, max_epochs=1).fit(module, DataLoader(Numbered(SAMPLES), batch_size=2))
    return module


class ForComposer(ComposerModel):
    def __init__(self, core: Any) -> None:
        super().__init__()
        self.core = core

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.core.loss(batch)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs


def with_composer(case: Case, replica: int, collective: Any) -> nn.Module:
    model = ForComposer(case.make(replica))
    optimizer, scheduler = case.optimize(model)
    every = {"schedulers": scheduler, "step_schedulers_every_batch": True} if scheduler is not None else {}
    ours = AutoLoCo(
        collective=collective, policy=policy_of(case), token_fn=count, step_schedulers_every_batch=bool(every)
    )
    sampler = replica_sampler(Numbered(SAMPLES), shuffle=True, replica=replica, replicas=2)
    train(
        model,
        DataLoader(Numbered(SAMPLES), batch_size=2, sampler=sampler),
        ours,
        At(Event.BATCH_START, lambda state: model.core.begin(state.timestamp.batch.value)),
        optimizers=optimizer,
        max_duration="1ep",
        **every,
    )
    return model


@pytest.mark.parametrize("name", CASES)
def test_three_ways_to_the_same_weights(name: str) -> None:
    case = CASES[name]
    ends = []
    with warnings.catch_warnings():
        if case.warns:
            warnings.filterwarnings("ignore", message=f".*{case.warns}.*")
        for way in (with_a_loop, with_lightning, with_composer):
            first, second = in_threads(2, lambda index, collective, way=way: way(case, index, collective))
            states = [
                {key: value for key, value in weights(module).items() if key not in case.local}
                for module in (first, second)
            ]
            assert_same_bits(*states)
            ends.append(states[0])
    assert_same_bits(*ends)
    start = weights(ByHand(case.make(0)))
    assert any(not torch.equal(start[key], ends[0][key]) for key in start)
    assert all(torch.isfinite(value).all() for value in ends[0].values())
