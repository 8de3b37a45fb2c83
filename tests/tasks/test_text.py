"""Text as bytes: the same files give the same windows; training and validation never share a file."""

from __future__ import annotations

import pytest
import torch

from composer_replication.tasks.text import ResumableLoader, Windows, text_bytes


@pytest.fixture
def folder(tmp_path):
    for index in range(200):
        name = tmp_path / f"part{index % 5}" / f"f{index:03d}.txt"
        name.parent.mkdir(exist_ok=True)
        name.write_bytes(bytes([index]) * 50)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "skipped.txt").write_bytes(b"\xff" * 50)
    return tmp_path


def test_labels_are_the_next_bytes():
    windows = Windows(torch.arange(10, dtype=torch.uint8), context=4)
    assert len(windows) == 2
    assert windows[1]["input_ids"].tolist() == [4, 5, 6, 7]
    assert windows[1]["labels"].tolist() == [5, 6, 7, 8]
    with pytest.raises(IndexError):
        windows[2]


def test_equal_folders_give_equal_bytes_whatever_the_file_system_says(folder):
    a = text_bytes(path=str(folder), pattern="**/*.txt", context=10, batch_size=2)
    b = text_bytes(path=str(folder), pattern="**/*.txt", context=10, batch_size=2)
    assert torch.equal(a.train.data, b.train.data) and torch.equal(a.validation.data, b.validation.data)


def test_no_file_is_in_both_parts(folder):
    data = text_bytes(path=str(folder), pattern="**/*.txt", context=10, batch_size=2)
    train, validation = set(data.train.data.tolist()), set(data.validation.data.tolist())
    assert not train & validation
    assert train | validation == set(range(200))  # and the tests folder is left out


def test_the_cap_is_kept(folder):
    data = text_bytes(path=str(folder), pattern="**/*.txt", context=10, batch_size=2, max_bytes=120)
    assert len(data.train.data) == 120


def test_one_file_is_split_at_its_end(tmp_path):
    file = tmp_path / "book.txt"
    file.write_bytes(bytes(range(160)))
    data = text_bytes(path=str(file), context=8, batch_size=2)
    assert data.train.data.tolist() == list(range(150)) and data.validation.data.tolist() == list(range(150, 160))


def test_the_standard_library_is_real_text():
    data = text_bytes(context=64, batch_size=4, max_bytes=100_000, validation_bytes=20_000)
    assert len(data.train.data) == 100_000 and len(data.validation.data) == 20_000
    assert b"def " in bytes(data.train.data.tolist())
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape == (4, 64) and batch["input_ids"].dtype == torch.int64


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"context": 0}, "context"), ({"path": "/nowhere/at/all"}, "/nowhere/at/all"), ({"pattern": "*.zzz"}, "too few")],
)
def test_bad_settings_are_named(settings, word):
    with pytest.raises(ValueError, match=word):
        text_bytes(**settings)


def test_a_loader_goes_on_where_it_was():
    data = Windows(torch.arange(81, dtype=torch.uint8), context=8)

    def loader():
        return ResumableLoader(data, batch_size=2)

    def first(batches):
        return [int(batch["input_ids"][0, 0]) for batch in batches]

    whole = loader()
    batches = iter(whole)
    assert first([next(batches), next(batches)]) == [0, 16]
    state = whole.state_dict()
    again = loader()
    again.load_state_dict(state)
    assert first(again) == [32, 48, 64] == first(batches)
    assert first(again) == [0, 16, 32, 48, 64]  # the next epoch is whole
    assert again.state_dict() == {"batches": 0}  # and after it comes a new one
