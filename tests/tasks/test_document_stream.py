"""Documents as a stream: each replica its own, in full windows or padded, and from the very place where it was."""

from __future__ import annotations

import hashlib
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_replication.adapter.tokens import count_tokens
from composer_replication.isolate import REPLICA, REPLICAS, Identity
from composer_replication.lightning.data import unsharded_reason
from composer_replication.tasks.document_stream import DocumentData, document_stream
from composer_replication.tasks.next_token import IGNORED
from composer_replication.tasks.sources import Source
from composer_replication.tasks.streams import StreamLoader
from tests.support.language_model import save_language_model
from tests.support.rows import write_documents, write_rows

pytest.importorskip("fsspec")
END = "<|end|>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_language_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    place(monkeypatch, 0, 1)


def place(monkeypatch: pytest.MonkeyPatch, replica: int, replicas: int) -> None:
    monkeypatch.setenv(REPLICA, str(replica))
    monkeypatch.setenv(REPLICAS, str(replicas))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part in range(4):
        write_documents(tmp_path / "c4" / f"train.{part}.jsonl", 6, first=10 * part)
    return tmp_path / "c4"


def stream(model: str, folder: Path, **settings: Any) -> DocumentData:
    given = {"context": 8, "batch_size": 2, "validation_documents": 5, "pad_token": END}
    return document_stream(tokenizer=model, uri=str(folder), validation_uri=str(folder), **{**given, **settings})


def some(data: DocumentData, count: int) -> list[dict[str, torch.Tensor]]:
    return list(islice(iter(data.train_dataloader()), count))


def read(tokenizer: Any, batches: list[dict[str, torch.Tensor]]) -> list[str]:
    """Each example's text, without its padding."""
    found = []
    for batch in batches:
        masks = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        found += [
            tokenizer.decode(ids[mask == 1].tolist()) for ids, mask in zip(batch["input_ids"], masks, strict=True)
        ]
    return found


def test_a_document_is_an_example_cut_or_padded(model: str, tokenizer: Any, folder: Path) -> None:
    batches = some(stream(model, folder, pack=False), 12)
    assert {tuple(batch["input_ids"].shape) for batch in batches} == {(2, 8)}
    texts = read(tokenizer, batches)
    assert len(set(texts)) == 24 and all(len(tokenizer(text)["input_ids"]) <= 8 for text in texts)
    assert f"0:{END}" in texts and f"12:{'ab' * 5}"[:8] in texts and "5:ababab" in texts  # which is cut
    for batch in batches:
        mask, labels = batch["attention_mask"], batch["labels"]
        assert int(count_tokens(batch)) == int(mask.sum())
        # Every token but a document's first is a label, and nothing else is.
        assert torch.equal((labels != IGNORED).sum(1), mask.sum(1) - 1)


def test_packed_windows_are_the_documents_one_after_the_other(model: str, tokenizer: Any, folder: Path) -> None:
    batches = some(stream(model, folder), 12)
    text = "".join(read(tokenizer, batches))
    pieces = [one for one in text.split(END) if one]
    whole = read(tokenizer, some(stream(model, folder, pack=False, context=100), 12))
    assert pieces[:-1] == [one.removesuffix(END) for one in whole[: len(pieces) - 1]]
    for batch in batches:
        assert set(batch) == {"input_ids", "labels"} and torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
        assert count_tokens(batch) == 16


@pytest.mark.parametrize("replicas", [2, 3])  # files are dealt whole where there are enough, else rows
def test_every_document_goes_to_one_replica(
    model: str, tokenizer: Any, folder: Path, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = []
    for replica in range(replicas):
        place(monkeypatch, replica, replicas)
        data = stream(model, folder, pack=False)
        assert unsharded_reason(data.train_dataloader(), Identity(replica=replica, replicas=replicas)) is None
        shares.append(read(tokenizer, some(data, 12 // replicas)))
    assert sorted(text for share in shares for text in share) == sorted(
        read(tokenizer, some(stream_alone(model, folder, monkeypatch), 12))
    )


def test_files_are_dealt_whole_by_number_where_there_are_enough(folder: Path) -> None:
    """Those of replica r are the r-th, (r + N)-th, ... in the order of a hash of their names; else it's rows."""
    names = [f"train.{part}.jsonl" for part in range(4)]
    ordered = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    assert ordered != names
    source = Source(uri=str(folder), field="text")
    for replica in range(2):
        places = [where for where, _ in source.rows((replica, 2))]
        wanted = [f"{folder}/{name}, line {line}" for name in ordered[replica::2] for line in range(1, 7)]
        assert places == wanted
    every = [f"{folder}/{name}, line {line}" for name in ordered for line in range(1, 7)]
    assert [where for where, _ in source.rows((1, 3))] == every[1::3]


def stream_alone(model: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> DocumentData:
    place(monkeypatch, 0, 1)
    return stream(model, folder, pack=False)


def test_behind_the_last_document_comes_the_first(model: str, tokenizer: Any, folder: Path) -> None:
    texts = read(tokenizer, some(stream(model, folder, pack=False), 25))
    assert texts[24:] == texts[:26] and len(texts) == 50


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("workers", [0, pytest.param(3, marks=pytest.mark.processes)])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than a small machine has cores
def test_a_checkpoint_leads_on_to_the_very_next_example(model: str, folder: Path, pack: bool, workers: int) -> None:
    whole = some(stream(model, folder, pack=pack, workers=workers), 17)  # over the end of the first pass
    first = stream(model, folder, pack=pack, workers=workers).train_dataloader()
    taken = list(islice(iter(first), 10))
    state = first.state_dict()
    assert state["handed"] == 10
    again = stream(model, folder, pack=pack, workers=workers).train_dataloader()
    again.load_state_dict(state)
    rest = list(islice(iter(again), 7))
    for one, expected in zip([*taken, *rest], whole, strict=True):
        assert all(torch.equal(one[name], expected[name]) for name in expected)
    assert again.state_dict()["handed"] == 17
    other = stream(model, folder, pack=pack, workers=workers + 2).train_dataloader()
    with pytest.raises(ValueError, match=f"workers must be {max(1, workers)}, as when the checkpoint was made"):
        other.load_state_dict(state)


def test_larger_batches_hold_the_same_examples(model: str, tokenizer: Any, folder: Path) -> None:
    loader = stream(model, folder).train_dataloader()
    large = loader.larger(3)
    assert isinstance(large, StreamLoader) and large.batch_size == 6
    assert read(tokenizer, list(islice(iter(large), 2))) == read(tokenizer, some(stream(model, folder), 6))


def test_validation_is_of_so_many_documents(model: str, tokenizer: Any, folder: Path) -> None:
    data = stream(model, folder, pack=False, validation_batch_size=3)
    batches = list(data.val_dataloader())
    assert [len(batch["input_ids"]) for batch in batches] == [3, 2]
    assert read(tokenizer, batches) == read(tokenizer, some(stream(model, folder, pack=False), 3))[:5]
    packed = stream(model, folder)
    text = "".join(read(tokenizer, list(packed.val_dataloader())))
    assert text and text in "".join(read(tokenizer, some(packed, 6)))


def test_a_data_set_by_name_is_dealt_by_datasets(
    model: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    for part in range(2):
        write_documents(tmp_path / "set" / f"train-{part}.parquet", 4, first=10 * part)
    texts = []
    for replica in range(2):
        place(monkeypatch, replica, 2)
        data = document_stream(
            tokenizer=model,
            dataset=str(tmp_path / "set"),
            validation_split="train",
            context=100,
            batch_size=2,
            pack=False,
            pad_token=END,
        )
        texts.append(read(tokenizer, some(data, 2)))
    assert sorted(texts[0] + texts[1]) == sorted(f"{i}:{'ab' * (i % 7)}{END}" for i in (*range(4), *range(10, 14)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context": 1}, "context must be at least 2, got 1"),
        ({"workers": -1}, "workers must be at least 0, got -1"),
        ({"pack": False, "pad_token": None}, "pad_token is missing: the tokenizer .* has no padding token"),
        ({"validation_uri": None}, "validation_uri is missing: files for validation"),
        ({"uri": None, "validation_uri": None}, "not neither"),
        ({"context": 2000}, "gives no example of up to 2000 tokens for validation"),
        ({"field": "body"}, r"line 1 has no field 'body' \(it has text\)"),
        ({"dataset": "x"}, "not both"),
    ],
)
def test_bad_settings_are_named(model: str, folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        document_stream(
            **{"tokenizer": model, "uri": str(folder), "validation_uri": str(folder), "pad_token": END, **settings}
        )


def test_rows_that_are_no_text(model: str, tmp_path: Path) -> None:
    good = write_documents(tmp_path / "good.jsonl", 9)
    rows = write_rows(tmp_path / "a.jsonl", [{"text": "one"}, {"text": " "}, {"text": None}, {"text": 4}])
    data = document_stream(tokenizer=model, uri=str(rows), validation_uri=str(good), context=4, pack=True)
    with pytest.raises(ValueError, match="a.jsonl, line 4 has no text in the field 'text', but int"):
        some(data, 1)
    empty = write_rows(tmp_path / "b.jsonl", [{"text": ""}])
    data = document_stream(tokenizer=model, uri=str(empty), validation_uri=str(good), context=4)
    with pytest.raises(ValueError, match="b.jsonl gives replica 0 of 1 no document"):
        some(data, 1)
