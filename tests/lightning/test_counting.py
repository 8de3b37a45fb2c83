"""What counts as a step, at which learning rate, and what counts as a token."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from composer_replication.collective.in_process import InProcessFleet
from composer_replication.lightning import AutoLoCoCallback, count_tokens
from tests.lightning.helpers import Tiny, assert_same_bits, callback, in_threads, loader, trainer, weights


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


def test_accumulation_counts_optimizer_steps_not_batches() -> None:
    ours = alone(base_horizon=2)
    watch = Watch(ours)
    trainer(ours, watch, max_epochs=1, accumulate_grad_batches=4).fit(Tiny(), loader(17))
    # Steps come with batches 4, 8, 12, 16 and, because the epoch ends, 17.
    assert watch.rounds == [0] * 7 + [1] * 8 + [2] + [3]
    assert plan_steps(ours) == [2, 2, 1]
    assert ours.final is not None and ours.final.position == 5


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


class Overflowing(Tiny):
    """Batches 1, 2 and 5 of 8 give infinite gradients."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self._before: Tensor | None = None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx in (1, 2, 5) else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=self.fused)

    def on_train_batch_start(self, *_: Any) -> None:
        self._before = self.net[0].weight.detach().clone()


class Changes(pl.Callback):
    """Which batches changed the weights; listed before the callback, so that it sees them before the outer step."""

    def __init__(self) -> None:
        self.changed: list[bool] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.changed.append(not torch.equal(module._before, module.net[0].weight))


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skipped_are_not_counted(fused: bool) -> None:
    ours = alone(base_horizon=4, token_fn=lambda batch: batch["x"].shape[0])
    changes, watch = Changes(), Watch(ours)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    trainer(changes, ours, watch, max_epochs=1, plugins=[plugin]).fit(Overflowing(fused=fused), loader(8))
    assert changes.changed == [True, False, False, True, True, False, True, True]
    # Four steps that changed the weights are complete with batch 7; the fifth is flushed at the end.
    assert watch.rounds == [0, 0, 0, 0, 0, 0, 1, 2]
    assert ours.final is not None and ours.final.position == 5
    # Only the tokens behind those steps count: one a batch.
    assert [summary.tokens for summary in ours.rounds] == [4, 1]


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


def test_the_rate_that_is_counted_is_the_one_that_was_used() -> None:
    masses: list[float] = []

    def replica(_: int, collective: Any) -> None:
        inner = collective.average

        def average(contribution: Any) -> Any:
            masses.append(contribution.report.mass)
            return inner(contribution)

        collective.average = average
        trainer(callback(collective, base_horizon=2), max_epochs=1).fit(Tiny(scheduler=True, lr=0.5), loader(4))

    in_threads(1, replica)
    used = [0.5 / (1.0 + 0.1 * step) for step in range(4)]
    assert masses == [used[0] + used[1], used[2] + used[3]]


class TwoGroups(Tiny):
    def configure_optimizers(self) -> Any:
        # 35 and 12 trainable elements
        first, second = self.net[0].parameters(), self.net[2].parameters()
        return torch.optim.SGD([{"params": first, "lr": 0.1}, {"params": second, "lr": 0.4}])


def test_the_rate_of_several_groups_is_weighted_by_their_elements() -> None:
    ours = alone(base_horizon=2)
    trainer(ours, max_epochs=1).fit(TwoGroups(), loader(4))
    # On a fixed interval mass and base mass are the same; the rate itself shows in the plan.
    mean = (35 * 0.1 + 12 * 0.4) / 47
    assert ours.rounds[0].next_plan.mass == pytest.approx(2 * mean, rel=1e-12)


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


class Words(Tiny):
    """Batches of token ids with padding; the loss is that of a linear map of their mean."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        real = batch["attention_mask"].sum()
        x = torch.nn.functional.pad(real.float().reshape(1, 1), (0, 5)) / 1000
        return self.net(x).square().mean()


def words(real: int, batches: int, padding: int) -> DataLoader[Any]:
    mask = torch.tensor([1] * real + [0] * padding)
    return DataLoader([{"input_ids": torch.arange(real + padding), "attention_mask": mask}] * batches)


def test_weights_follow_tokens_when_asked_and_padding_never_counts() -> None:
    """One replica sees 10 real tokens, the other 1,000, with equal horizons."""

    def replica(index: int, collective: Any, weighting: str) -> tuple[Any, ...]:
        module = Words(lr=1.0)
        ours = callback(collective, base_horizon=2, weighting=weighting, outer_lr=1.0, outer_momentum=0.0)
        before = weights(module)
        real = (10, 1000)[index]
        trainer(ours, max_steps=2, use_distributed_sampler=False).fit(module, words(real, 2, padding=50))
        return before, weights(module), ours

    # What each would have become alone:
    apart = []
    for real in (10, 1000):
        module = Words(lr=1.0)
        trainer(max_steps=2, strategy="auto").fit(module, words(real, 2, padding=50))
        apart.append(weights(module))
    for weighting, share in (("equal", 0.5), ("tokens", 10 / 1010)):
        with pytest.warns(UserWarning, match="isn't sharded"):
            first, second = in_threads(2, lambda i, c, w=weighting: replica(i, c, w))
        assert first[2].rounds[0].tokens == 2 * (10 + 1000)
        assert_same_bits(first[1], second[1])
        for name, tensor in first[1].items():
            expected = share * apart[0][name] + (1 - share) * apart[1][name]
            # sums and differences of float32 numbers below 1
            torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-6)


def test_a_batch_without_token_information() -> None:
    ours = alone(base_horizon=2, weighting="tokens")
    module = Tiny()
    before = weights(module)
    with pytest.raises(ValueError, match=r"weighting='tokens'.*neither attention_mask nor input_ids.*token_fn="):
        trainer(ours, max_epochs=1).fit(module, loader(4))
    assert_same_bits(before, weights(module))

    ours = alone(base_horizon=2, policy="autoloco")
    with pytest.warns(UserWarning, match="tokens aren't counted") as told:
        trainer(ours, max_epochs=1).fit(Tiny(), loader(6))
    assert len([one for one in told if "tokens aren't counted" in str(one.message)]) == 1
    assert [summary.tokens for summary in ours.rounds] == [None, None, None]


def test_the_preview_that_is_not_exact_says_so_once() -> None:
    class Stepped(Tiny):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step()

    ours = alone(base_horizon=2)
    with pytest.warns(UserWarning, match="lr_scheduler_step is overridden") as told:
        trainer(ours, max_epochs=1).fit(Stepped(scheduler=True), loader(6))
    assert len([one for one in told if "can't be previewed" in str(one.message)]) == 1
