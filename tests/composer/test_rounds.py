"""Where rounds fall among a Trainer's batches, and who sees which weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("composer")

import torch
from composer.core import Event
from composer.loggers import InMemoryLogger
from torch import Tensor
from torch.utils.data import DataLoader

from composer_replication.adapter.files import latest_checkpoint
from composer_replication.collective.in_process import InProcessFleet
from composer_replication.composer import AutoLoCo, AutoLoCoCallback
from tests.composer.helpers import (
    At,
    Regression,
    algorithm,
    assert_same_bits,
    data,
    in_threads,
    train,
    weights,
)
from tests.lightning.helpers import Numbered


def alone(**options: Any) -> AutoLoCo:
    return algorithm(InProcessFleet(1).collectives()[0], **options)


def saved(folder: Path, batch: int) -> dict[str, Tensor]:
    # Composer's checkpoints hold times and versions of its own.
    return torch.load(folder / f"ep0-ba{batch}-rank0.pt", weights_only=False)["state"]["model"]


def test_seven_batches_with_rounds_of_three(tmp_path: Path) -> None:
    """Outer steps at 3 and 6, a last one at 7; everything that comes after a batch sees the weights after its round."""

    def replica(index: int, collective: Any) -> Any:
        after: list[dict[str, Tensor]] = []
        before: list[dict[str, Tensor]] = []
        ours, model, memory = algorithm(collective, base_horizon=3), Regression(seed=index), InMemoryLogger()
        train(
            model,
            data(14, index, 2),
            At(Event.BATCH_END, lambda state: after.append(weights(state.model))),  # stands before ours, comes after
            ours,
            At(Event.AFTER_TRAIN_BATCH, lambda state: before.append(weights(state.model))),
            max_duration="7ba",
            loggers=[memory],
            save_folder=str(tmp_path / f"replica-{index}"),
            save_interval="1ba",
        )
        return ours, after, before, memory

    (first, after, starts, memory), (second, others, other_starts, _) = in_threads(2, replica)
    assert [summary.steps for summary in first.rounds] == [3, 3, 1]
    assert_same_bits(starts[0], other_starts[0])  # seeds 0 and 1: both began with replica 0's weights
    assert [torch.equal(a["net.0.weight"], b["net.0.weight"]) for a, b in zip(after, others, strict=True)] == [
        *(False, False, True),
        *(False, False, True),
        True,
    ]
    for batch in range(1, 8):
        assert_same_bits(after[batch - 1], saved(tmp_path / "replica-0", batch))
    assert first.final is not None and second.final is not None and first.final.digest == second.final.digest
    logged = memory.data["autoloco/round"]
    assert [(int(time.batch), value) for time, value in logged] == [(3, 0.0), (6, 1.0), (7, 2.0)]
    assert {"autoloco/loss", "autoloco/horizon", "autoloco/wait_seconds", "autoloco/rates_exact"} <= set(memory.data)


def uneven(index: int, collective: Any, counts: tuple[int, ...], folder: Path | None = None) -> Any:
    model, ours = Regression(seed=index), algorithm(collective, checkpoint_dir=folder)
    train(model, data(40, index, 2), ours, max_duration=f"{counts[index]}ba")
    return weights(model), ours, model


def test_uneven_ends_give_one_model_and_the_last_file_holds_it(tmp_path: Path) -> None:
    (first, ours, model), (second, *_) = in_threads(2, lambda i, c: uneven(i, c, (10, 7), tmp_path))
    assert_same_bits(first, second)
    assert [(summary.members, summary.steps) for summary in ours.rounds] == [((0, 1), 4), ((0, 1), 4), ((0,), 2)]
    assert len(model.seen) == 10
    for replica in (0, 1):
        path = latest_checkpoint(tmp_path, replica)
        assert path is not None
        assert_same_bits(first, torch.load(path, weights_only=False)["state"]["model"])


def test_epochs_end_between_rounds_and_the_last_one_is_foreseen(tmp_path: Path) -> None:
    def replica(index: int, collective: Any) -> Any:
        model, ours = Regression(seed=index), algorithm(collective)
        folder = tmp_path / str(index)
        train(model, data(12, index, 2), ours, max_duration="3ep", save_folder=str(folder), save_interval="1ep")
        return ours, weights(model), torch.load(folder / "ep3-ba18-rank0.pt", weights_only=False)["state"]["model"]

    (first, shared, checkpoint), (_, other, _) = in_threads(2, replica)
    assert [summary.steps for summary in first.rounds] == [4, 4, 4, 4, 2]
    assert_same_bits(shared, other, checkpoint)


def test_samples_as_duration() -> None:
    ours = alone(base_horizon=3)
    train(Regression(), data(40, batch_size=2), ours, max_duration="14sp")
    assert [summary.steps for summary in ours.rounds] == [3, 3, 1]
    assert ours.final is not None and ours.final.position == 7


def test_a_loader_without_length() -> None:
    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            while True:
                yield from (Numbered(8)[i] for i in range(8))

    ours = alone(base_horizon=3)
    train(Regression(), DataLoader(Endless(), batch_size=1), ours, max_duration="7ba")
    assert [summary.steps for summary in ours.rounds] == [3, 3, 1]


def test_the_callback_puts_the_algorithm_first() -> None:
    callback = AutoLoCoCallback(collective=InProcessFleet(1).collectives()[0], policy="fixed", base_horizon=4)
    other = At(Event.BATCH_END, lambda state: None)
    made = train(Regression(), data(8), other, callbacks=[callback], max_duration="1ep")
    assert made.state.algorithms == [callback.algorithm, other]
    assert [summary.steps for summary in callback.algorithm.rounds] == [4, 4]


def test_equal_first_batches_are_reported() -> None:
    def replica(index: int, collective: Any) -> AutoLoCo:
        ours = algorithm(collective)
        train(Regression(), DataLoader(Numbered(8), batch_size=1), ours, max_duration="1ep")
        return ours

    with pytest.warns(UserWarning, match="began with the same batch"):
        first, _ = in_threads(2, replica)
    assert any("replicas [1] began with the same batch" in text for text in first.said)
    assert any("replica_sampler" in text for text in first.said)
