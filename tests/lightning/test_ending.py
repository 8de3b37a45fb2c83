"""Every replica ends with the same model, whenever each of them runs out of data."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from composer_replication.collective.in_process import InProcessFleet
from composer_replication.lightning import latest_checkpoint
from tests.lightning.helpers import Numbered, Tiny, assert_same_bits, callback, in_threads, loader, trainer, weights


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
