"""What counts as a step, at which learning rate, and what counts as a token."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from composer_replication.collective.in_process import InProcessFleet
from composer_replication.lightning import AutoLoCoCallback, count_tokens
from tests.lightning.helpers import Tiny, callback, loader, trainer


class Watch(pl.Callback):
    """After each batch: how many rounds are closed, and the trainer's own step count."""

    def __init__(self, ours: AutoLoCoCallback) -> None:
        self.ours = ours
        self.rounds: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.rounds.append(len(self.ours.rounds))


def alone(**options: Any) -> AutoLoCoCallback:
    return callback(InProcessFleet(1).collectives()[0], **options)


def plan_steps(ours: AutoLoCoCallback) -> list[int]:
    return [summary.steps for summary in ours.rounds]


class TwoOptimizers(Tiny):
    """The second optimizer steps with every second batch."""

    def __init__(self, *, through_trainer: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.through_trainer = through_trainer

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[0].parameters(), lr=0.1), torch.optim.SGD(self.net[2].parameters(), lr=0.2)]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        first, second = self.optimizers(use_pl_optimizer=self.through_trainer)
        loss = nn.functional.mse_loss(self.net(batch["x"]), batch["y"])
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        if batch_idx % 2 == 1:
            second.step()
            second.zero_grad()


@pytest.mark.parametrize("through_trainer", [True, False])
def test_manual_optimization_counts_the_optimizer_that_is_named(through_trainer: bool) -> None:
    for optimizer, horizon, closed_after in ((0, 3, [3, 6, 7]), (1, 2, [4, 7])):
        ours = alone(base_horizon=horizon, optimizer=optimizer)
        watch = Watch(ours)
        trainer(ours, watch, max_epochs=1).fit(TwoOptimizers(through_trainer=through_trainer), loader(7))
        assert [watch.rounds.index(n) + 1 for n in range(1, len(closed_after) + 1)] == closed_after
        assert ours.final is not None and ours.final.position == (7 if optimizer == 0 else 3)


def test_several_optimizers_are_refused_until_one_is_named() -> None:
    with pytest.raises(ValueError, match=r"2 optimizers.*optimizer=0 to optimizer=1"):
        trainer(alone(), max_epochs=1).fit(TwoOptimizers(), loader(4))
    with pytest.raises(ValueError, match=r"optimizer must be between 0 and 1, got 2"):
        trainer(alone(optimizer=2), max_epochs=1).fit(TwoOptimizers(), loader(4))


class SometimesNothing(Tiny):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in (0, 3) else loss


@pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`.*:UserWarning")
def test_a_training_step_that_returns_none_is_not_a_step() -> None:
    ours = alone(base_horizon=2)
    watch = Watch(ours)
    trainer(ours, watch, max_epochs=1).fit(SometimesNothing(), loader(6))
    assert watch.rounds == [0, 0, 1, 1, 1, 2]
    assert ours.final is not None and ours.final.position == 4


# -- tokens ----------------------------------------------------------------------------------------------------------


def test_count_tokens() -> None:
    ids = torch.tensor([[5, 6, 0], [7, 0, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    labels = torch.tensor([[-100, 6, -100], [-100, -100, -100]])
    assert int(count_tokens({"input_ids": ids, "attention_mask": mask, "labels": labels}, pad_token_id=0)) == 4
    assert int(count_tokens({"input_ids": ids, "labels": labels}, pad_token_id=0)) == 3
    assert int(count_tokens({"input_ids": ids})) == 6
    assert int(count_tokens((ids, labels), token_fn=lambda batch: (batch[0] > 5).sum())) == 2
    assert count_tokens((ids, labels)) is None
    assert count_tokens({"labels": labels}) is None
    # An attention mask per head says who sees whom, not what is padding.
    assert int(count_tokens({"input_ids": ids, "attention_mask": torch.ones(2, 1, 3, 3)}, pad_token_id=0)) == 3


def test_the_preview_that_is_not_exact_says_so_once() -> None:
    class Stepped(Tiny):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step()

    ours = alone(base_horizon=2)
    with pytest.warns(UserWarning, match="lr_scheduler_step is overridden") as told:
        trainer(ours, max_epochs=1).fit(Stepped(scheduler=True), loader(6))
    assert len([one for one in told if "can't be previewed" in str(one.message)]) == 1
