"""`launch --dry-run`: the first batches are read, no more than they take, and what a replica couldn't read is found."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from composer_replication.cli import main
from tests.support.language_model import save_language_model
from tests.support.rows import conversation, write_rows

pytest.importorskip("transformers")
pytest.importorskip("lightning")

END = "<|end|>"
MANY = 600  # rows, of which none that comes this late is looked at


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_language_model(tmp_path_factory.mktemp("model")))


def rows_of(kind: str, *, bad: int) -> list[dict[str, Any]]:
    """With one of another format, as row `bad`."""
    if kind == "conversations":
        rows: list[dict[str, Any]] = [conversation(f"Question {i}", f"Answer {i}") for i in range(MANY)]
        return [*rows[: bad - 1], {"messages": "no list"}, *rows[bad - 1 :]]
    rows = [{"text": f"document {i}"} for i in range(MANY)]
    return [*rows[: bad - 1], {"text": 4}, *rows[bad - 1 :]]


def dry_run(kind: str, folder: Path, tokenizer: str, *more: str, bad: int = MANY) -> int:
    data = write_rows(folder / "rows.jsonl", rows_of(kind, bad=bad))
    args = {"tokenizer": tokenizer, "uri": str(data), "context": 16, "batch_size": 3, "workers": 2}
    if kind != "text_lm":
        args |= {"validation_uri": str(data), "pad_token": END, "validation_batch_size": 5}
    recipe = {"name": "r", "model": {"name": "byte_gpt"}, "data": {"name": kind, "args": args}}
    (folder / "r.yaml").write_text(json.dumps(recipe))
    return main(["launch", str(folder / "r.yaml"), "--dry-run", f"output={folder / 'run'}", *more])


@pytest.mark.parametrize(
    ("kind", "more", "read"),
    [
        ("documents", (), "(3 × 16 tokens) and the first for validation (5 × 16 tokens)"),
        ("documents", ("data.args.pack=false",), "(3 × 16 tokens) and the first for validation (5 × 11 tokens)"),
        ("conversations", ("data.args.context=64",), "(3 × 37 tokens) and the first for validation (5 × 37 tokens)"),
        ("text_lm", (), "(3 × 16 tokens) and the first for validation (1 × 16 tokens)"),
    ],
)
def test_the_first_batches_are_read_and_no_more(
    kind: str, more: tuple[str, ...], read: str, tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(kind, tmp_path, tokenizer, *more) == 0
    out = capsys.readouterr().out
    assert "# data: read as far as the first batch for" in out and read in out and "Nothing was started." in out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("kind", "more", "bad", "words"),
    [
        ("documents", (), 2, "data.args: .*rows.jsonl, line 2 has no text in the field 'text', but int"),
        ("conversations", (), 2, "rows.jsonl, line 2: the field 'messages' must be a list of messages, not str"),
        ("text_lm", (), 2, "rows.jsonl, line 2 has no text"),
        ("documents", ("data.args.uri=/nowhere",), MANY, "data.args: there is no file or folder /nowhere"),
        ("documents", ("data.args.validation_uri=null",), MANY, "validation_uri is missing"),
        ("documents", ("data.args.tokenizer=/nowhere",), MANY, "data.args.tokenizer: .*'/nowhere' can't be loaded"),
        ("conversations", ("data.args.validation_batch_size=0",), MANY, "validation_batch_size must be at least 1"),
    ],
)
def test_what_a_replica_could_not_read_is_found(
    kind: str,
    more: tuple[str, ...],
    bad: int,
    words: str,
    tokenizer: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert dry_run(kind, tmp_path, tokenizer, *more, bad=bad) == 2
    said = capsys.readouterr()
    assert re.search(words, said.err), said.err
    assert "# fine" not in said.out


@pytest.mark.parametrize("group", [False, True])
def test_the_data_is_read_with_the_replicas_environment(
    group: bool, tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA_URI", "/nowhere")
    env = f"env={{DATA_URI: {tmp_path / 'rows.jsonl'}}}"
    where = ["executor." + env]
    if group:
        where = ["executor.env={DATA_URI: /neither}", "fleet.groups=[{executor: local, count: 2}]"]
        where.append("fleet.groups.0.options." + env)
    before = dict(os.environ)
    assert dry_run("text_lm", tmp_path, tokenizer, "data.args.uri=null", *where) == 0
    assert "# data: read as far as" in capsys.readouterr().out and dict(os.environ) == before


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("documents", ("data.args.uri=hf://datasets/me/text/a.jsonl?revision=x",)),
        ("documents", ("data.args.validation_uri=HF://datasets/me/text/a.jsonl",)),
        ("text_lm", ("data.args.uri=null", "executor.env={DATA_URI: hf://me/text/a}")),
    ],
)
def test_files_on_the_hub_are_not_fetched(
    kind: str, more: tuple[str, ...], tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(kind, tmp_path, tokenizer, *more) == 0
    said = capsys.readouterr().out
    assert re.search("# data: not read: (?i:hf)://[a-z/.]+ is on the Hub, from which a dry run fetches no data", said)


def test_what_is_not_read_is_said(tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run("documents", tmp_path, tokenizer, "data.args.uri=null", "data.args.dataset=me/data") == 0
    assert "# data: not read: me/data is on the Hub, from which a dry run fetches no data" in capsys.readouterr().out
    assert dry_run("documents", tmp_path, tokenizer, "data.args.tokenizer=me/nothing") == 0
    assert "# data: not read: the tokenizer me/nothing isn't in this machine's cache" in capsys.readouterr().out
    own = {"class": "tests.support.rows.write_rows", "args": {"path": "a", "rows": []}}
    (tmp_path / "own.yaml").write_text(json.dumps({"name": "own", "model": {"name": "byte_gpt"}, "data": own}))
    assert main(["launch", str(tmp_path / "own.yaml"), "--dry-run"]) == 0
    assert "# data: not read: data of your own (data.class)" in capsys.readouterr().out
