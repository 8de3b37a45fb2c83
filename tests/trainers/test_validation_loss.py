"""The validation loss is the mean over all targets, however unequally they lie in batches, under both trainers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from composer_replication.simulation.fleet import validation_loss
from composer_replication.tasks.byte_gpt import ByteGPT
from composer_replication.tasks.examples import Examples, Padded
from composer_replication.tasks.next_token import IGNORED
from composer_replication.tasks.text import TextData

# Two in a batch: 1 + 2 targets in the first, 14 + 5 in the second, 3 in the last.
EXAMPLES = [
    (list(range(5)), [False] * 4 + [True]),
    (list(range(10, 20)), [False] * 8 + [True] * 2),
    (list(range(30, 45)), None),
    (list(range(50, 60)), [False] * 5 + [True] * 5),
    (list(range(70, 74)), None),
]


@pytest.fixture
def data() -> TextData[Examples]:
    examples = Examples(EXAMPLES)
    assert examples.targets == 25 and examples.tokens == 44
    return TextData(train=examples, validation=examples, batch_size=2, collate=Padded(0))


@pytest.fixture
def model() -> ByteGPT:
    torch.manual_seed(0)
    return ByteGPT(width=16, layers=1, heads=2, context=16)


def by_hand(model: ByteGPT, data: TextData[Examples]) -> float:
    total, count = 0.0, 0
    with torch.no_grad():
        for i in range(len(data.validation)):
            example = data.validation[i]
            chances = model(example["input_ids"][None])[0].log_softmax(-1)
            for position, label in enumerate(example["labels"].tolist()):
                if label != IGNORED:
                    total, count = total - float(chances[position, label]), count + 1
    assert count == 25
    return total / count


def test_simulate_and_lightning(model: ByteGPT, data: TextData[Examples]) -> None:
    expected = by_hand(model.eval(), data)
    means = [validation_loss(model, _one(data, [index])) for index in range(5)]
    assert sum(means) / 5 != pytest.approx(expected, rel=1e-3)  # which a mean of means would be
    # Float32 losses of batches, against single ones.
    assert validation_loss(model, data) == pytest.approx(expected, rel=1e-5)
    pytest.importorskip("lightning")
    from lightning.pytorch import Trainer

    from composer_replication.tasks.language_module import LanguageModule

    module = LanguageModule(model, make_optimizer=_unused, make_scheduler=_unused)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer: Any = Trainer(accelerator="cpu", enable_checkpointing=False, **quiet)
    (found,) = trainer.validate(module, data.val_dataloader(), verbose=False)
    assert found["validation_loss"] == pytest.approx(expected, rel=1e-5)


def test_composer(model: ByteGPT, data: TextData[Examples]) -> None:
    pytest.importorskip("composer")
    from composer_replication.tasks.composer_model import LanguageModel

    expected = by_hand(model.eval(), data)
    wrapped = LanguageModel(model)
    (metric,) = wrapped.get_metrics(is_train=False).values()
    with torch.no_grad():
        for batch in data.val_dataloader():
            wrapped.update_metric(batch, wrapped.eval_forward(batch), metric)
    assert float(metric.compute()) == pytest.approx(expected, rel=1e-5)


def _one(data: TextData[Examples], indices: list[int]) -> Any:
    class One:
        def val_dataloader(self) -> DataLoader[Any]:
            chosen: Any = torch.utils.data.Subset(data.validation, indices)
            return DataLoader(chosen, batch_size=1, collate_fn=data.collate)

    return One()


def _unused(*_: Any) -> Any:
    raise AssertionError("nothing is trained here")


def test_a_loss_that_is_no_number_shows() -> None:
    pytest.importorskip("lightning")
    from composer_replication.tasks.language_module import LanguageModule

    class Diverged(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return torch.full((*input_ids.shape, 4), torch.nan)

    module = LanguageModule(Diverged(), make_optimizer=_unused, make_scheduler=_unused)
    module.log = lambda *_, **__: None  # type: ignore[method-assign]  # no trainer here
    ids = torch.ones(1, 3, dtype=torch.int64)
    module.validation_step({"input_ids": ids, "labels": ids}, 0)
    assert module._validation.compute() == torch.inf
