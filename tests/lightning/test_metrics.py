"""Metrics at the step they belong to, on whichever replica somebody looks."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from composer_replication.collective.in_process import InProcessFleet
from tests.lightning.helpers import Tiny, callback, in_threads, loader, trainer


def rows(logger: CSVLogger) -> list[dict[str, str]]:
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_every_round_is_logged_at_its_own_step(tmp_path: Path) -> None:
    """Rounds of 7 with log_every_n_steps=10: nothing dropped, nothing late. Only replica 1 has a logger."""

    class Logged(Tiny):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss)
            return loss

    logger = CSVLogger(tmp_path, name="one")

    def replica(index: int, collective: Any) -> Any:
        module = Logged(seed=index)
        ours = callback(collective, base_horizon=7)
        fit = trainer(ours, max_epochs=1, logger=logger if index == 1 else False, log_every_n_steps=10)
        fit.fit(module, loader(2 * 24))
        return ours.rounds, module.losses

    (other, _), (closed, losses) = in_threads(2, replica)
    assert len(other) == len(closed) == 4
    found = {int(row["step"]): row for row in rows(logger) if row.get("autoloco/round")}
    assert sorted(found) == [6, 13, 20, 23]  # steps count from 0, as Lightning's own do
    assert [float(found[step]["autoloco/round"]) for step in (6, 13, 20, 23)] == [0, 1, 2, 3]
    for step, (start, stop), summary in zip(
        (6, 13, 20, 23), ((0, 7), (7, 14), (14, 21), (21, 24)), closed, strict=True
    ):
        row = found[step]
        assert float(row["autoloco/horizon"]) == 7
        assert float(row["autoloco/interval_steps"]) == stop - start
        assert float(row["autoloco/loss"]) == pytest.approx(sum(losses[start:stop]) / (stop - start), rel=1e-6)
        if step != 23:  # with nobody left to plan for, the last round isn't measured
            assert float(row["autoloco/coherence"]) == pytest.approx(summary.coherence)
        assert float(row["autoloco/rates_exact"]) == 1
        assert float(row["autoloco/train_seconds"]) > 0
        late = summary.straggler  # of this round; what the report tells of the one before isn't mixed in
        assert (row.get("autoloco/straggler") or None) == (None if late is None else str(float(late[0])))
        assert not any(name.startswith("autoloco/last_") for name in row)
    # The module's own metrics are where they always were.
    assert [int(row["step"]) for row in rows(logger) if row.get("train_loss")] == [9, 19]


def test_with_accumulation_the_step_is_the_optimizer_s(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="one")
    ours = callback(InProcessFleet(1).collectives()[0], base_horizon=2)
    trainer(ours, max_epochs=1, logger=logger, log_every_n_steps=12, accumulate_grad_batches=3).fit(
        Tiny(), loader(12, batch_size=1)
    )
    assert [int(row["step"]) for row in rows(logger) if row.get("autoloco/round")] == [1, 3]


class Bar(TQDMProgressBar):
    def __init__(self) -> None:
        super().__init__()
        self.shown: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *rest)
        self.shown.append(dict(self.get_metrics(trainer, pl_module)))


def test_the_progress_bar_has_a_line() -> None:
    bar = Bar()
    ours = callback(InProcessFleet(1).collectives()[0], base_horizon=2)
    trainer(ours, bar, max_epochs=1, enable_progress_bar=True).fit(Tiny(), loader(6))
    line = bar.shown[-1]
    assert (line["round"], line["horizon"]) == (2, 2)
    assert {"interval_loss", "wait"} <= line.keys()


def test_manual_optimization_with_no_loss_logs_the_rest(tmp_path: Path) -> None:
    class Manual(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(torch.nn.functional.mse_loss(self.net(batch["x"]), batch["y"]))
            optimizer.step()

    logger = CSVLogger(tmp_path, name="one")
    trainer(callback(InProcessFleet(1).collectives()[0]), max_epochs=1, logger=logger, log_every_n_steps=1).fit(
        Manual(), loader(8)
    )
    found = [row for row in rows(logger) if row.get("autoloco/round")]
    assert len(found) == 2 and all(not row.get("autoloco/loss") for row in found)


def test_barebones_trainers_work() -> None:
    ours = callback(InProcessFleet(1).collectives()[0], base_horizon=2)
    from lightning.pytorch import Trainer

    Trainer(barebones=True, accelerator="cpu", devices=1, max_epochs=1, callbacks=[ours]).fit(Tiny(), loader(4))
    assert len(ours.rounds) == 2


def test_micro_batches_are_told_at_their_whole_loss() -> None:
    """Lightning divides what training_step returns by their number before anybody else sees it."""

    def replica(index: int, collective: Any) -> Any:
        module, ours = Tiny(seed=index), callback(collective, base_horizon=4)
        fit = trainer(ours, max_epochs=1, logger=False, accumulate_grad_batches=3)
        fit.fit(module, loader(2 * 24))
        return ours.rounds, module.losses

    for index, (closed, losses) in enumerate(in_threads(2, replica)):
        told = [one.member_metrics[index]["loss"] for one in closed]
        parts = [losses[12 * i : 12 * (i + 1)] for i in range(len(told))]
        assert told == pytest.approx([sum(part) / len(part) for part in parts], rel=1e-5)
