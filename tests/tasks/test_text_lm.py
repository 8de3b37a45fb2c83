"""Text as tokens: what is read, in which order, and what is refused; nothing is padded and nothing is read twice."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from composer_replication.errors import RecipeError
from composer_replication.tasks import corpus
from composer_replication.tasks.corpus import documents
from composer_replication.tasks.text_lm import text_lm
from tests.support.language_model import CONTEXT, save_language_model

pytest.importorskip("fsspec")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_language_model(tmp_path_factory.mktemp("model")))


def whole(uri: object, **settings: str) -> list[str]:
    """The documents below `uri`, their pieces put together."""
    found, pieces = [], ""
    for text, ends in documents(str(uri), **settings):
        pieces += text
        if ends:
            found.append(pieces)
            pieces = ""
    assert pieces == ""
    return found


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("one\ntwo\r\n", newline="")
    (tmp_path / "deep" / "b.jsonl").write_text('{"text": "three"}\n\n{"text": "four ü", "more": 1}\n')
    (tmp_path / "deep" / "c.txt.gz").write_bytes(gzip.compress(b"five"))
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    return tmp_path


def test_a_folder_gives_all_text_files_below_it_in_an_order_that_is_the_same_everywhere(folder: Path) -> None:
    found = whole(folder)
    assert sorted(found) == ["five", "four ü", "one\ntwo\r\n", "three"]
    assert found.index("three") + 1 == found.index("four ü")  # in a file its own order
    moved = folder.rename(folder.with_name("elsewhere"))
    assert whole(moved) == whole(moved.as_uri()) == found


def test_a_file_or_a_pattern_gives_what_it_names(folder: Path) -> None:
    assert whole(folder / "a.txt") == ["one\ntwo\r\n"]
    assert whole(folder / "deep" / "c.txt.gz") == ["five"]
    assert sorted(whole(f"file://{folder}/deep/*.jsonl")) == ["four ü", "three"]
    (folder / "notes").write_text("six")
    assert whole(folder / "notes") == ["six"]  # named outright, whatever it is called


def test_a_folder_whose_name_has_a_space(folder: Path) -> None:
    spaced = folder.rename(folder.with_name("with space"))
    assert "%20" in spaced.as_uri() and len(whole(spaced.as_uri())) == 4


def test_a_long_document_comes_in_pieces_cut_at_a_line_s_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PIECE_CHARACTERS", 10)
    (tmp_path / "long.txt").write_text("".join(f"line {i}\n" for i in range(7)))
    pieces = list(documents(str(tmp_path)))
    assert len(pieces) > 2 and all(text.endswith("\n") for text, _ in pieces)
    assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True]
    assert "".join(text for text, _ in pieces) == (tmp_path / "long.txt").read_text()


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"body": ["one", None, "two"], "n": [1, 2, 3]}), tmp_path / "a.parquet")
    assert whole(tmp_path, field="body") == ["one", "two"]
    with pytest.raises(ValueError, match="no column 'text' .it has body, n."):
        whole(tmp_path)


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(RecipeError, match="a.parquet needs pyarrow .*pip install pyarrow"):
        whole(tmp_path)


@pytest.mark.servers
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_bucket_with_the_same_options_as_a_store(s3_uri: str, folder: Path) -> None:
    from composer_replication.store import open_store

    store = open_store(s3_uri)
    for path in folder.rglob("*.*"):
        store.put(path.relative_to(folder).as_posix(), path.read_bytes())
    assert whole(s3_uri) == whole(folder)
    bucket, _, options = s3_uri.partition("?")
    assert whole(f"{bucket}/a.txt?{options}") == ["one\ntwo\r\n"]
    with pytest.raises(ValueError, match="there is no file or folder s3://.*/nothing"):
        whole(f"{bucket}/nothing?{options}")


@pytest.mark.servers
def test_a_repository_of_the_hub(folder: Path) -> None:
    """In a process of its own: the Hub's client takes its endpoint when it is imported."""
    pytest.importorskip("huggingface_hub")
    from tests.support.hub import Hub

    script = (
        "import pathlib, sys\n"
        "from composer_replication.store import open_store\n"
        "from composer_replication.tasks.corpus import documents\n"
        "store, folder = open_store('hf://datasets/me/runs/one'), pathlib.Path(sys.argv[1])\n"
        "for path in folder.rglob('*.*'): store.put(path.relative_to(folder).as_posix(), path.read_bytes())\n"
        "for uri in ('hf://datasets/me/runs/one', 'hf://datasets/me/runs/one?revision=main'):\n"
        "    assert list(documents(uri)) == list(documents(str(folder))), uri\n"
        "print(list(documents('hf://datasets/me/runs/one/deep/c.txt.gz')))"
    )
    with Hub() as hub:
        env = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_of_the_suite", "HF_HOME": str(folder.parent / "home")}
        env = {**os.environ, "PYTHONPATH": os.getcwd(), **env}
        command = [sys.executable, "-c", script, str(folder)]
        ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert ran.stdout.strip() == "[('five', True)]", ran.stderr


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff\xfe", "a.txt isn't UTF-8 text"),
        ("a.txt.gz", b"no archive", "can't be read"),
        ("a.jsonl", b'{"text": "x"}\nnot json\n', "a.jsonl, line 2 isn't JSON"),
        ("a.jsonl", b'{"body": "x"}\n', "line 1 has no text in the field 'text' .it has body."),
        ("a.jsonl", b"[1]\n", "line 1 has no text in the field 'text' .it has list."),
        ("a.bin", b"x", "holds no .txt, .jsonl, .json, .parquet files"),
    ],
)
def test_what_is_no_text(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        whole(tmp_path)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("/nowhere/at/all", "there is no file or folder /nowhere/at/all"),
        ("  ", "URI is empty"),
        ("s3://key:secret@bucket/x", "credentials don't belong into a URI"),
        ("nonsense://x/y", "can't be read|Protocol not known"),
    ],
)
def test_a_place_that_can_t_be_read(uri: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        whole(uri)


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_documents_follow_one_another_and_windows_are_full(model: str, tmp_path: Path) -> None:
    lines = [f"document {i} of the test" for i in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    data = text_lm(tokenizer=model, uri=str(tmp_path), context=8, batch_size=2)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = torch.cat([data.train.data, data.validation.data])
    assert tokenizer.decode(tokens.tolist()) == "".join(line + tokenizer.eos_token for line in lines)
    assert len(data.validation.data) == len(tokens) // 16
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape == (2, 8) and torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
    # No window holds anything but text: there is nothing that a count of tokens would have to leave out.
    seen = torch.cat([data.train[i]["input_ids"] for i in range(len(data.train))])
    assert torch.equal(seen, data.train.data[: len(seen)].to(torch.int64))
    assert set(batch) == {"input_ids", "labels"} and len(data.train.data) - len(seen) <= 8


def test_the_text_s_place_may_come_from_the_environment(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATA_URI", raising=False)
    with pytest.raises(ValueError, match="set DATA_URI in the environment, or data.args.uri"):
        text_lm(tokenizer=model)
    (tmp_path / "a.txt").write_text("abc " * 500)
    monkeypatch.setenv("DATA_URI", str(tmp_path))
    data = text_lm(tokenizer=model, batch_size=2)
    assert data.train.context == CONTEXT  # the tokenizer's longest
    assert data.train.data[:4].tolist() == text_lm(tokenizer=model, uri=str(tmp_path)).train.data[:4].tolist()


def test_the_cap_is_kept_and_told(model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("abc " * 500)
    data = text_lm(tokenizer=model, uri=str(tmp_path), context=4, batch_size=2, max_tokens=160)
    assert len(data.train.data) + len(data.validation.data) == 160
    assert "reading stops after 160 tokens (max_tokens)" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context": 0}, "context must be at least 1"),
        ({"context": CONTEXT + 1}, "context must be at most the tokenizer's longest, 32, got 33"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"context": 16}, "gives 6 training windows of 16 tokens: too few"),
        ({"context": 4, "validation_tokens": 2}, "gives 0 validation windows"),
        ({"tokenizer": "/nowhere"}, "the tokenizer '/nowhere' can't be loaded"),
    ],
)
def test_bad_settings_are_named(model: str, tmp_path: Path, settings: dict[str, object], message: str) -> None:
    (tmp_path / "a.txt").write_text("abcd" * 28)
    given: dict[str, object] = {"tokenizer": model, "uri": str(tmp_path), "batch_size": 8}
    with pytest.raises(ValueError, match=message):
        text_lm(**{**given, **settings})  # type: ignore[arg-type]


def test_half_a_character_is_no_text() -> None:
    from composer_replication.tasks.corpus import is_text

    assert is_text("") and is_text("naïve 😀") and not is_text("bad \ud800") and not is_text(None) and not is_text(b"x")
