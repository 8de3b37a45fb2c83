"""Stopping anywhere and going on gives what never stopping gives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from composer_replication.adapter.files import write_checkpoint
from composer_replication.collective.in_process import InProcessFleet
from composer_replication.lightning import latest_checkpoint
from tests.lightning.helpers import (
    Numbered,
    Tiny,
    assert_same_bits,
    callback,
    flat,
    in_threads,
    loader,
    trainer,
    weights,
)


class Rewindable:
    """One replica's share, in order, and the loader knows where it is."""

    def __init__(self, count: int, replica: int, replicas: int) -> None:
        self.samples = Numbered(count)
        self.ids = list(range(replica, count, replicas))
        self.at = 0

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.at < len(self.ids):
            sample = self.samples[self.ids[self.at]]
            self.at += 1
            yield {name: value.unsqueeze(0) for name, value in sample.items()}
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class StopAfter(pl.Callback):
    """What a notice of preemption does, at a known batch."""

    def __init__(self, batches: int | None) -> None:
        self.batches = batches

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.batches:
            trainer._signal_connector.received_sigterm = True


def run(stops: list[int], folder: Path, *, accumulate: int, safe: bool = True) -> list[tuple[Any, ...]]:
    """40 optimizer steps of two replicas, stopped after these numbers of batches; what they saw, and how it ended."""
    seen: dict[int, list[list[int]]] = {0: [], 1: []}
    losses: dict[int, list[float]] = {0: [], 1: []}
    ends: list[Any] = []
    for stop in [*stops, None]:

        def replica(index: int, collective: Any, stop: int | None = stop) -> Any:
            module = Tiny(optimizer="adamw", scheduler=True, lr=0.02, seed=index)
            ours = callback(
                collective,
                base_horizon=3,
                policy="autoloco",
                horizon_step=1,
                checkpoint_dir=folder,
                token_fn=lambda batch: batch["x"].shape[0],
            )
            fit = trainer(ours, StopAfter(stop), max_epochs=1, accumulate_grad_batches=accumulate, strategy="auto")
            data = Rewindable(2 * 40 * accumulate, index, 2)
            path = latest_checkpoint(folder, index)
            try:
                fit.fit(module, data, ckpt_path=path, weights_only=safe)
                assert stop is None
            except SIGTERMException as told:
                assert stop is not None and told.code == 143
            seen[index] += module.seen
            losses[index] += module.losses
            return weights(module), ours.final

        ends = in_threads(2, replica)
    return [(seen[i], losses[i], *ends[i]) for i in (0, 1)]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_stops_inside_intervals_and_inside_accumulation_change_nothing(tmp_path: Path, accumulate: int) -> None:
    straight = run([], tmp_path / "straight", accumulate=accumulate)
    # After steps 7, 13 and 22; with accumulation one batch and two batches into the next step.
    stops = [7, 13, 22] if accumulate == 1 else [7 * 3 + 1, 13 * 3 + 2, 22 * 3]
    stopped = run(stops, tmp_path / "stopped", accumulate=accumulate)
    for index in (0, 1):
        assert sorted(flat(stopped[index][0])) == list(range(index, 80 * accumulate, 2))
        assert stopped[index][0] == straight[index][0]
        assert stopped[index][1] == straight[index][1]
        assert stopped[index][3].digest == straight[index][3].digest
    assert_same_bits(straight[0][2], straight[1][2], stopped[0][2], stopped[1][2])


def test_a_plain_loader_gets_one_clear_warning(tmp_path: Path) -> None:
    for steps, expected in ((6, 1), (8, 0)):
        folder = tmp_path / str(steps)

        def fit(stop: int | None, folder: Path = folder) -> None:
            ours = callback(InProcessFleet(1).collectives()[0], checkpoint_dir=folder)
            path = latest_checkpoint(folder, 0)
            trainer(ours, StopAfter(stop), max_epochs=2).fit(Tiny(), loader(8), ckpt_path=path, weights_only=True)

        with pytest.raises(SIGTERMException):
            fit(steps)
        if expected:
            with pytest.warns(UserWarning, match="before the epoch ended") as told:
                fit(None)
            assert len([one for one in told if "epoch" in str(one.message)]) == 1
        else:
            fit(None)  # the epoch was complete: nothing to warn of


def test_a_plain_loader_of_unknown_place_is_told_by_us(tmp_path: Path) -> None:
    """Where a loader has no length, Lightning says nothing."""

    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(Numbered(100))

    def fit(stop: int | None) -> None:
        ours = callback(InProcessFleet(1).collectives()[0], checkpoint_dir=tmp_path)
        path = latest_checkpoint(tmp_path, 0)
        data = torch.utils.data.DataLoader(Endless(), batch_size=1)
        trainer(ours, StopAfter(stop), max_steps=12).fit(Tiny(), data, ckpt_path=path, weights_only=True)

    with pytest.raises(SIGTERMException):
        fit(6)
    with pytest.warns(UserWarning, match="the training loader can't say where it was") as told:
        fit(None)
    assert len([one for one in told if "loader" in str(one.message)]) == 1


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
def test_resume_from_the_trainer_s_own_checkpoint_inside_an_interval(tmp_path: Path) -> None:
    """ModelCheckpoint's file holds trainer and outer state: 6 and 10 steps in, with rounds of 4."""

    def replica(index: int, collective: Any, path: str | None, steps: int, every: int) -> tuple[Any, Any]:
        module = Tiny(optimizer="adamw", seed=index)
        save = ModelCheckpoint(dirpath=tmp_path / f"replica-{index}", every_n_train_steps=every, save_top_k=-1)
        ours = callback(collective)
        fit = trainer(ours, save, max_steps=steps, max_epochs=-1, enable_checkpointing=True, strategy="auto")
        fit.fit(module, Rewindable(40, index, 2), ckpt_path=path, weights_only=True)
        return weights(module), ours.final

    whole = in_threads(2, lambda i, c: replica(i, c, None, 16, 6))
    for step in (6, 12):
        path = str(tmp_path / "replica-{}" / f"epoch=0-step={step}.ckpt")
        resumed = in_threads(2, lambda i, c, p=path: replica(i, c, p.format(i), 16, 6))
        assert_same_bits(whole[0][0], whole[1][0], resumed[0][0], resumed[1][0])
        assert whole[0][1].digest == resumed[0][1].digest


def test_dropout_goes_on_with_the_same_masks(tmp_path: Path) -> None:
    class Dropping(Tiny):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return super().training_step({**batch, "x": torch.nn.functional.dropout(batch["x"])}, batch_idx)

    def fit(stop: int | None, folder: Path) -> list[float]:
        torch.manual_seed(99)
        module = Dropping()
        torch.manual_seed(99 if latest_checkpoint(folder, 0) is None else 5)
        ours = callback(InProcessFleet(1).collectives()[0], checkpoint_dir=folder)
        fitting = trainer(ours, StopAfter(stop), max_epochs=1, strategy="auto")
        try:
            path = latest_checkpoint(folder, 0)
            fitting.fit(module, Rewindable(12, 0, 1), ckpt_path=path, weights_only=True)
        except SIGTERMException:
            assert stop is not None
        return module.losses

    straight = fit(None, tmp_path / "a")
    assert fit(6, tmp_path / "b") + fit(None, tmp_path / "b") == straight
    assert len(straight) == 12


def test_a_checkpoint_of_a_run_that_has_ended(tmp_path: Path) -> None:
    def fit(steps: int, fits: list[int]) -> Any:
        def meet(number: int) -> Any:
            fits.append(number)
            return InProcessFleet(1).collectives()[0]

        ours = callback(meet, replica=0, replicas=1, checkpoint_dir=tmp_path)
        path = latest_checkpoint(tmp_path, 0)
        trainer(ours, max_steps=steps, max_epochs=-1, strategy="auto").fit(
            Tiny(), Rewindable(40, 0, 1), ckpt_path=path, weights_only=True
        )
        return ours.final

    fits: list[int] = []
    final = fit(10, fits)
    assert fits == [0]
    # Started again by mistake: complete, and says how it ended.
    assert fit(10, fits) == final and fits == [0]
    # Given more steps, it goes on as a run of its own.
    longer = fit(18, fits)
    assert fits == [0, 1] and longer.position == 8


# -- files -----------------------------------------------------------------------------------------------------------


def test_durable_checkpoints_are_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert latest_checkpoint(tmp_path, 0) is None
    for round in (1, 2, 3):
        write_checkpoint(tmp_path, 0, {"at": round}, round=round, step=10 * round)
    write_checkpoint(tmp_path, 1, {"at": 9}, round=9, step=90)
    folder = tmp_path / "replica-0"
    names = ["round-000002-step-000000020.ckpt", "round-000003-step-000000030.ckpt"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert latest_checkpoint(tmp_path, 0) == str(folder / names[1])

    # Killed in the middle of a write: what is there under its name is the one before.
    (folder / ".round-000004-step-000000040.ckpt.123").write_bytes(b"half of")
    assert latest_checkpoint(tmp_path, 0) == str(folder / names[1])

    def fails(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="no space left"):
        write_checkpoint(tmp_path, 0, {"at": 5}, round=5, step=50)
    assert latest_checkpoint(tmp_path, 0) == str(folder / names[1])
    assert not list(folder.glob(".round-000005*"))
    assert torch.load(folder / names[1], weights_only=True) == {"at": 3}


def test_the_newest_checkpoint_is_that_of_the_newest_round(tmp_path: Path) -> None:
    """A replica that comes back without its checkpoint joins at the fleet's round, and counts its steps from 0."""
    for round, step in ((6, 60), (7, 70)):
        write_checkpoint(tmp_path, 0, {}, round=round, step=step)
    written = [write_checkpoint(tmp_path, 0, {}, round=round, step=step) for round, step in ((9, 10), (10, 20))]
    assert latest_checkpoint(tmp_path, 0) == str(written[1])
    assert sorted((tmp_path / "replica-0").iterdir()) == sorted(written)
    # Rounds begin at 0 again with the next fit.
    later = write_checkpoint(tmp_path, 0, {}, fit=1, round=1, step=30)
    assert latest_checkpoint(tmp_path, 0) == str(later)
    # Whatever else lies there: what has just been written stays.
    assert write_checkpoint(tmp_path, 0, {}, round=2, step=5).exists()


def test_a_second_fit_s_checkpoints_are_newer(tmp_path: Path) -> None:
    ours = callback(lambda fit: InProcessFleet(1).collectives()[0], replica=0, replicas=1, checkpoint_dir=tmp_path)
    fit = trainer(ours, max_epochs=1)
    fit.fit(Tiny(), loader(16))
    fit.fit_loop.max_epochs = 2
    fit.fit(Tiny(), loader(16))
    path = latest_checkpoint(tmp_path, 0)
    assert path is not None and path.endswith("fit-002-round-000004-step-000000032.ckpt")
    assert torch.load(path, weights_only=True)["global_step"] == 32


@pytest.mark.processes
def test_drafts_of_the_dead_are_removed_and_those_of_the_living_kept(tmp_path: Path) -> None:
    folder = tmp_path / "replica-0"
    folder.mkdir()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(timeout=60)
    name = ".round-000001-step-000000010.ckpt."
    for process in (dead.pid, os.getpid(), os.getppid()):
        (folder / f"{name}{process}").write_bytes(b"half of")
    (folder / ".notes.txt").write_text("not ours")
    path = write_checkpoint(tmp_path, 0, {}, round=2, step=20)
    assert {one.name for one in folder.iterdir()} == {f"{name}{os.getppid()}", ".notes.txt", path.name}


def test_every_checkpoint_pairs_data_with_the_weights_that_saw_it(tmp_path: Path) -> None:
    """Whenever a replica dies, its newest file holds one moment: never newer data than weights."""

    class Inspect(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            path = latest_checkpoint(tmp_path, 0)
            if path is not None:
                saved = torch.load(path, weights_only=True)
                loop = saved["callbacks"]["AutoLoCo"]["fit_state"]["loop"]
                at = saved["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]["at"]
                assert at == saved["global_step"] == 3 * int(Path(path).name[6:12])
                for name, tensor in saved["state_dict"].items():
                    assert torch.equal(loop["anchor"][name].view_as(tensor), tensor)
                found.append(at)

    found: list[int] = []
    ours = callback(InProcessFleet(1).collectives()[0], base_horizon=3, checkpoint_dir=tmp_path)
    trainer(ours, Inspect(), max_epochs=1, strategy="auto").fit(Tiny(), Rewindable(10, 0, 1))
    assert found == [3, 3, 3, 6, 6, 6, 9, 9]


def test_checkpoints_every_second_round(tmp_path: Path) -> None:
    rounds: list[str] = []

    class Inspect(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            path = latest_checkpoint(tmp_path, 0)
            rounds.append(Path(path).name[6:12] if path else "")

    ours = callback(
        InProcessFleet(1).collectives()[0], base_horizon=1, checkpoint_dir=tmp_path, checkpoint_every_rounds=2
    )
    trainer(ours, Inspect(), max_epochs=1).fit(Tiny(), loader(5))
    assert rounds == ["", "000002", "000002", "000004", "000004"]
