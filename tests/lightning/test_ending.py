"""Every replica ends with the same model, whenever each of them runs out of data."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from composer_replication.collective.in_process import InProcessFleet
from composer_replication.lightning import latest_checkpoint
from tests.lightning.helpers import Numbered, Tiny, assert_same_bits, callback, in_threads, loader, trainer, weights

OWN_DATA = {"use_distributed_sampler": False, "strategy": "auto"}


def uneven(replica: int, collective: Any, counts: tuple[int, ...], **options: Any) -> tuple[Any, Any, Tiny]:
    module = Tiny(seed=replica)
    ours = callback(collective, **options)
    batches = loader(20) if counts[replica] else []
    trainer(ours, max_epochs=1, limit_train_batches=counts[replica] or 1.0, **OWN_DATA).fit(module, batches)
    return weights(module), ours, module


@pytest.mark.filterwarnings("ignore:.*began with the same batch:UserWarning")
@pytest.mark.filterwarnings("ignore:Total length of `list`:UserWarning")
@pytest.mark.filterwarnings("ignore:Total length of `CombinedLoader`:UserWarning")
def test_uneven_loaders_end_with_one_model() -> None:
    results = in_threads(3, lambda i, c: uneven(i, c, (10, 7, 0)))
    assert_same_bits(results[0][0], results[1][0], results[2][0])
    rosters = [(summary.members, summary.steps) for summary in results[0][1].rounds]
    # 4 steps of both, 4 of the first with 3 of the second, which then leaves, and the first's last two.
    assert rosters == [((0, 1), 4), ((0, 1), 4), ((0,), 2)]
    assert [summary.absent for summary in results[0][1].rounds][0] == {2: "no steps"}
    assert [len(module.seen) for *_, module in results] == [10, 7, 0]
    assert {ours.final.digest for _, ours, _ in results} == {results[0][1].final.digest}
    assert not torch.equal(results[0][0]["net.0.weight"], weights(Tiny(seed=0))["net.0.weight"])


@pytest.mark.filterwarnings("ignore:.*began with the same batch:UserWarning")
def test_a_partial_interval_counts_for_the_part_that_was_trained() -> None:
    """Outer lr 1, no momentum: the mean weighs 4 steps of one replica and 1 of the other 4 : 1."""
    options = {"outer_lr": 1.0, "outer_momentum": 0.0}
    results = in_threads(2, lambda i, c: uneven(i, c, (4, 1), **options))
    alone = []
    for steps in (4, 1):
        module = Tiny(seed=0)
        trainer(max_epochs=1, limit_train_batches=steps, strategy="auto").fit(module, loader(20))
        alone.append(weights(module))
    for name, tensor in results[1][0].items():
        # the expected value is rounded in another order
        torch.testing.assert_close(tensor, 0.8 * alone[0][name] + 0.2 * alone[1][name], rtol=0, atol=1e-6)
    assert_same_bits(results[0][0], results[1][0])


def test_the_last_batch_s_checkpoint_and_validation_hold_the_final_weights(tmp_path: Any) -> None:
    class Validated(Tiny):
        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.validated = weights(self)

    def replica(index: int, collective: Any) -> tuple[Any, Any, Any]:
        module = Validated()
        save = ModelCheckpoint(dirpath=tmp_path / str(index), save_last=True)
        # 11 steps: two rounds of 4, and a last one of 3
        fit = trainer(callback(collective), save, max_epochs=1, enable_checkpointing=True, num_sanity_val_steps=0)
        fit.fit(module, loader(22), loader(1))
        saved = torch.load(save.last_model_path, weights_only=True)
        return weights(module), module.validated, saved["state_dict"]

    first, second = in_threads(2, replica)
    assert_same_bits(first[0], first[1], first[2], second[0], second[1], second[2])


def test_a_checkpoint_on_a_boundary_holds_the_weights_after_the_outer_step(tmp_path: Any) -> None:
    class Keep(pl.Callback):
        def __init__(self) -> None:
            self.kept: list[Any] = []

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            self.kept.append(weights(module))

    def replica(index: int, collective: Any) -> tuple[Any, Any]:
        save = ModelCheckpoint(dirpath=tmp_path / f"replica-{index}", every_n_train_steps=4, save_top_k=-1)
        before, ours, after = Keep(), callback(collective), Keep()
        # ModelCheckpoint is listed first: Lightning runs it last all the same.
        trainer(save, before, ours, after, max_epochs=1, enable_checkpointing=True).fit(Tiny(), loader(16))
        saved = torch.load(tmp_path / f"replica-{index}" / "epoch=0-step=4.ckpt", weights_only=True)
        assert not torch.equal(before.kept[3]["net.0.weight"], after.kept[3]["net.0.weight"])
        return saved["state_dict"], after.kept[3]

    first, second = in_threads(2, replica)
    assert_same_bits(first[0], first[1], second[0], second[1])


def test_early_stopping_on_one_replica_lets_the_others_go_on() -> None:
    class StopAt(pl.Callback):
        def __init__(self, batch: int) -> None:
            self.batch = batch

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.should_stop = trainer.should_stop or batch_idx == self.batch

    def replica(index: int, collective: Any) -> tuple[Any, int, Any]:
        module, ours = Tiny(), callback(collective)
        trainer(ours, StopAt(5 if index else 99), max_epochs=1).fit(module, loader(24))
        return weights(module), len(module.seen), ours

    first, second = in_threads(2, replica)
    assert (first[1], second[1]) == (12, 6)
    assert_same_bits(first[0], second[0])
    assert [s.members for s in first[2].rounds] == [(0, 1), (0, 1), (0,)]


def test_two_fits_in_a_row_are_two_runs() -> None:
    def replica(index: int, meetings: list[Any]) -> list[Any]:
        module = Tiny()
        fits: list[int] = []

        def meet(fit: int) -> Any:
            fits.append(fit)
            return meetings[fit][index]

        ours = callback(meet, replica=index, replicas=2)
        fit = trainer(ours, max_epochs=1)
        fit.fit(module, loader(16))
        first, digest = weights(module), ours.final.digest
        fit.fit(module, loader(16))  # complete: nothing happens
        assert fits == [0] and ours.final.digest == digest
        fit.fit_loop.max_epochs = 2
        fit.fit(module, loader(16))
        assert fits == [0, 1]
        assert ours.final.digest != digest and ours.final.position == 8
        return [first, weights(module)]

    meetings = [InProcessFleet(2, timeout_seconds=60).collectives() for _ in range(2)]
    first, second = in_threads(2, lambda i, _: replica(i, meetings))
    assert_same_bits(first[0], second[0])
    assert_same_bits(first[1], second[1])
    assert not torch.equal(first[0]["net.0.weight"], first[1]["net.0.weight"])


def test_a_collective_serves_one_fit() -> None:
    ours = callback(InProcessFleet(1).collectives()[0])
    fit = trainer(ours, max_epochs=1)
    fit.fit(Tiny(), loader(8))
    fit.fit_loop.max_epochs = 2
    with pytest.raises(ValueError, match="a collective serves one fit"):
        fit.fit(Tiny(), loader(8))


@pytest.mark.parametrize("which", ["local", "shared"])
def test_validation_sees_the_weights_that_were_asked_for(which: str) -> None:
    class Validated(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.validated: list[Any] = []
            self.trained: list[Any] = []

        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.validated.append(weights(self))

        def on_train_batch_start(self, *_: Any) -> None:
            self.trained.append(weights(self))

    def replica(_: int, collective: Any) -> Validated:
        module = Validated()
        ours = callback(collective, validate_with=which)
        trainer(ours, max_epochs=1, val_check_interval=2, num_sanity_val_steps=1).fit(module, loader(16), loader(1))
        return module

    first, second = in_threads(2, replica)
    # One sanity check before the start, then after steps 2, 4, 6, 8; a round ends with 4 and with 8.
    assert len(first.validated) == 5
    start, middle = first.trained[0], first.trained[4]
    assert_same_bits(first.validated[2], second.validated[2], middle)
    assert_same_bits(first.validated[4], second.validated[4])
    if which == "shared":
        assert_same_bits(first.validated[1], second.validated[1], start)
        assert_same_bits(first.validated[3], second.validated[3], middle)
    else:
        assert not torch.equal(first.validated[1]["net.0.weight"], second.validated[1]["net.0.weight"])
        assert_same_bits(first.validated[1], first.trained[2])
    # Training went on from each replica's own weights either way.
    assert not torch.equal(first.trained[6]["net.0.weight"], second.trained[6]["net.0.weight"])
    assert not torch.equal(first.trained[6]["net.0.weight"], middle["net.0.weight"])


def test_the_final_checkpoint_is_the_fleet_s(tmp_path: Any) -> None:
    def replica(_: int, collective: Any) -> dict[str, Tensor]:
        trainer(callback(collective, checkpoint_dir=tmp_path), max_epochs=1).fit(Tiny(), loader(22))
        path = latest_checkpoint(tmp_path, collective.replica)
        assert path is not None and path.endswith("round-000003-step-000000011.ckpt")
        return torch.load(path, weights_only=True)["state_dict"]

    first, second = in_threads(2, replica)
    assert_same_bits(first, second)
    assert sorted(path.name for path in (tmp_path / "replica-0").iterdir()) == [
        "round-000002-step-000000008.ckpt",
        "round-000003-step-000000011.ckpt",
    ]


def test_a_replica_with_nothing_to_train_joins_and_follows() -> None:
    def replica(index: int, collective: Any) -> Any:
        module = Tiny(seed=index)
        limit = 1.0 if index else 0
        ours = callback(collective)
        trainer(ours, max_epochs=1, limit_train_batches=limit, strategy="auto").fit(module, loader(8))
        return weights(module), ours

    (first, ours), (second, _) = in_threads(2, replica)
    assert_same_bits(first, second)
    assert [summary.members for summary in ours.rounds] == [(1,)] and ours.final.position == 8


def test_a_replica_with_nothing_to_train_follows_one_that_shuffles() -> None:
    """Only the replica with data has a seed for its shards."""

    def replica(index: int, collective: Any) -> Any:
        module = Tiny(seed=index)
        data = DataLoader(Numbered(16), shuffle=True)
        trainer(callback(collective), max_epochs=1, limit_train_batches=0 if index else 1.0).fit(module, data)
        return weights(module), len(module.seen)

    first, second = in_threads(2, replica)
    assert_same_bits(first[0], second[0])
    assert (first[1], second[1]) == (8, 0)


def test_after_an_error_the_same_run_can_be_joined_again() -> None:
    runs: list[int] = []

    def meet(fit: int) -> Any:
        runs.append(fit)
        return InProcessFleet(1).collectives()[0]

    class Broken(Tiny):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            raise RuntimeError("once")

    ours = callback(meet, replica=0, replicas=1)
    with pytest.raises(RuntimeError, match="once"):
        trainer(ours, max_epochs=1).fit(Broken(), loader(8))
    trainer(ours, max_epochs=1).fit(Tiny(), loader(8))
    assert runs == [0, 0]


def test_an_error_in_training_is_published_and_passed_on() -> None:
    class Broken(Tiny):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 2:
                raise RuntimeError("no such\nlayer")
            return super().training_step(batch, batch_idx)

    fleet = InProcessFleet(1)
    with pytest.raises(RuntimeError):
        trainer(callback(fleet.collectives()[0]), max_epochs=1).fit(Broken(), loader(8))
    status = fleet.status[0]
    assert (status["state"], status["error"]) == ("failed", "RuntimeError: no such layer")
