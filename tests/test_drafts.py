"""A file is there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from composer_replication.drafts import draft_of, written_whole


@pytest.mark.parametrize("durable", [False, True])
def test_the_old_file_stays_until_the_new_one_is_whole(
    durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.json"
    path.write_text("old")
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(path.read_text()))
    with path.open() as reader:
        with written_whole(path, durable=durable) as draft:
            draft.write_text("new")
            assert draft.parent == tmp_path and path.read_text() == "old"
        assert reader.read() == "old"  # another file has taken its place
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
    assert synced == (["old"] if durable else [])


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text("old")
    with pytest.raises(KeyError), written_whole(path) as draft:
        draft.write_text("half")
        raise KeyError("x")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError), written_whole(path):
        pass  # nothing was written
    assert path.read_text() == "old"


def test_a_process_has_a_draft_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = draft_of(tmp_path / "a")
    assert here == draft_of(tmp_path / "a") and here.name.startswith(".a.")  # a message that names it is told once
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert draft_of(tmp_path / "a") != here
