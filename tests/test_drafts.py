"""A file is there whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
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


def test_what_killed_writers_have_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    host, _, own = draft_of(path).name.removeprefix(".file.json.").split("-")
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    me, alive, elsewhere = os.getpid(), os.getppid(), "000000" if host != "000000" else "111111"
    gone = {f"{host}-{me}-00000000", f"{host}-{ended.pid}-{own}", f"{elsewhere}-{me}-00000001"}
    kept = {f"{host}-{alive}-00000000", f"{elsewhere}-{me}-00000000", f"{host}-{me}-0000000", f"b.{host}-{me}-00000000"}
    others = {f".file2json.{host}-{me}-00000000", f"file.json.{host}-{me}-00000000"}
    for name in others | {f".file.json.{one}" for one in gone | kept}:
        (tmp_path / name).write_text("half")
    long_ago = (tmp_path / f".file.json.{elsewhere}-{me}-00000000").stat().st_mtime - 7200
    os.utime(tmp_path / f".file.json.{elsewhere}-{me}-00000001", (long_ago, long_ago))
    with written_whole(path) as draft:
        assert not draft.exists()
        draft.write_text("new")
    assert {one.name for one in tmp_path.iterdir()} == others | {f".file.json.{one}" for one in kept} | {"file.json"}
