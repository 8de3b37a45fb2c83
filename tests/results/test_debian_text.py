"""The text of the group `prose` is what its digest names, whatever was in its folder before."""

from __future__ import annotations

import gzip
import hashlib
import subprocess
from pathlib import Path

import pytest

from benchmarks.reproduction import debian_text


def test_pieces_of_another_version_don_t_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"prose" * 9000  # two pieces

    def run(command: list[str], *, check: bool, cwd: str | None = None) -> None:
        if command[0] == "apt-get":
            assert cwd is not None and check
            (Path(cwd) / f"{command[-1].partition('=')[0]}_1.deb").touch()
        else:
            Path(command[-1]).mkdir()
            (Path(command[-1]) / "guide.en.txt.gz").write_bytes(gzip.compress(text))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(debian_text.shutil, "which", lambda command: command)
    monkeypatch.setattr(debian_text, "ROOT", tmp_path)
    monkeypatch.setattr(debian_text, "PACKAGES", (("guide", "1", "*.en.txt.gz"),))
    monkeypatch.setattr(debian_text, "DIGEST", hashlib.sha256(text).hexdigest())
    folder = tmp_path / debian_text.DEBIAN_TEXT
    folder.mkdir(parents=True)
    for name in ("guide-02.txt", "old-00.txt", "notes.md"):
        (folder / name).write_text("of another version")
    assert debian_text.fetch() == f"{debian_text.DEBIAN_TEXT}: 1 guides, 45,000 bytes"
    assert {path.name for path in folder.iterdir()} == {"guide-00.txt", "guide-01.txt", "notes.md"}
