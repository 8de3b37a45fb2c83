"""Code on its way to where replicas run: what is packed, that it arrives as it was, and what is refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import logging
import os
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_replication.diloco.serverless.jobs.container import unpack
from composer_replication.diloco.serverless.jobs.marks import Marks
from composer_replication.diloco.serverless.jobs.shipping import code_files, pack_code
from composer_replication.errors import ExecutorError, RecipeError
from composer_replication.store import open_store

NAMES = st.text("abcXYZ0189 _-+ü猫", min_size=1, max_size=12).map(str.strip).filter(bool)
FILES = st.dictionaries(
    st.lists(NAMES, min_size=1, max_size=3).map(tuple), st.tuples(st.binary(max_size=200), st.booleans()), min_size=1
)


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return folder


def read(folder: Path) -> dict[str, tuple[bytes, bool]]:
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), bool(path.stat().st_mode & stat.S_IXUSR))
        for path in folder.rglob("*")
        if path.is_file()
    }


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=FILES)
def test_what_is_packed_arrives_as_it_was(files: dict[tuple[str, ...], Any], tmp_path_factory: Any) -> None:
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    for parts, (data, runs) in files.items():
        path = source.joinpath(*(f"d{part}" for part in parts[:-1]), f"{parts[-1]}.py")  # no file has a folder's name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o755 if runs else 0o600)
    before = read(source)
    packed = pack_code(source)
    unpack(packed, target)
    assert read(target) == before
    for path in source.rglob("*"):  # when it was written makes no difference
        os.utime(path, (1, 1))
    assert pack_code(source) == packed == pack_code(target)


def test_what_is_no_code_stays_here(tmp_path: Path, caplog: Any) -> None:
    kept = {"train.py": "pass", "pack/age.py": "x", "data/words.txt": "a b", "runs.py": "", "recipe.yaml": "name: x"}
    left = {
        ".git/config": "",
        ".venv/bin/python": "",
        "env9/pyvenv.cfg": "",
        "env9/lib/x.py": "",
        "pack/__pycache__/age.cpython.pyc": "",
        "pack.egg-info/PKG-INFO": "",
        ".env": "TOKEN=1",
        "keys/id_rsa": "",
        "server.pem": "",
        "runs/one/recipe.yaml": "",
        "runs/one/replica-0/log.txt": "",
        "runs/one/store/fleet.json": "{}",
        "weights.pt": bytes(8 * 1024 * 1024 + 1),
    }
    write(tmp_path / "code", {**kept, **left})
    (tmp_path / "outside").write_text("secret")
    (tmp_path / "code" / "out").symlink_to(tmp_path / "outside")
    (tmp_path / "code" / "up").symlink_to(tmp_path)
    (tmp_path / "code" / "nothing").symlink_to("nowhere")
    (tmp_path / "code" / "again.py").symlink_to("train.py")
    with caplog.at_level(logging.WARNING):
        names = [name for name, _ in code_files(tmp_path / "code")]
    assert names == sorted([*kept, "again.py"])
    assert "weights.pt (8.4 MB) is not sent along" in caplog.text


def test_too_much_names_the_largest(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "1" * 200, "big.bin": "2" * 900, "c/larger.txt": "3" * 1000})
    with pytest.raises(RecipeError) as caught:
        pack_code(tmp_path, largest_bytes=2000)
    message = str(caught.value)
    assert "holds 2.1 kB in 3 files, more than the 2.0 kB" in message
    assert "c/larger.txt (1.0 kB), big.bin (0.9 kB), a.py (0.2 kB)" in message
    assert pack_code(tmp_path, largest_bytes=2100)


def test_nothing_to_send_is_told(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="nothing to send"):
        pack_code(tmp_path)
    with pytest.raises(RecipeError, match="there is no folder"):
        pack_code(tmp_path / "missing")


def archive(*members: tarfile.TarInfo, data: bytes = b"x") -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for member in members:
            member.size = len(data) if member.isfile() else 0
            tar.addfile(member, io.BytesIO(data) if member.isfile() else None)
    return packed.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, target
    return made


@pytest.mark.parametrize(
    "members",
    [
        [member("../outside.py")],
        [member("a/../../outside.py")],
        [member("/tmp/composer-replication-outside.py")],
        [member("link", tarfile.SYMTYPE, "/etc"), member("link/passwd")],
        [member("hard", tarfile.LNKTYPE, "/etc/passwd")],
        [member("pipe", tarfile.FIFOTYPE)],
        [member("device", tarfile.CHRTYPE)],
    ],
    ids=lambda members: members[0].name,
)
def test_hostile_archives_are_refused(members: list[tarfile.TarInfo], tmp_path: Path) -> None:
    with pytest.raises(ExecutorError, match="isn't a plain file: not used"):
        unpack(archive(*members), tmp_path / "inside")
    assert not (tmp_path / "outside.py").exists()
    assert not Path("/tmp/composer-replication-outside.py").exists()


@pytest.mark.parametrize("cut", [0, 10, 25, -9, -1])
def test_a_damaged_archive_is_an_error_with_a_sentence(cut: int, tmp_path: Path) -> None:
    whole = pack_code(write(tmp_path / "code", {"a.py": os.urandom(5000)}))
    with pytest.raises(ExecutorError, match="the code's archive can't be read"):
        unpack(whole[:cut], tmp_path / "target")
    flipped = bytearray(gzip.compress(b"not a tar archive" * 100, mtime=0))
    with pytest.raises(ExecutorError, match="the code's archive can't be read"):
        unpack(bytes(flipped), tmp_path / "target")


def test_a_file_that_is_not_what_was_sent_is_not_used(tmp_path: Path) -> None:
    marks = Marks(open_store(str(tmp_path / "store")))
    digest = marks.send(pack_code(write(tmp_path / "code", {"a.py": "print('as sent')"})))
    other = pack_code(write(tmp_path / "code", {"a.py": "print('put in its place')"}))
    assert digest != hashlib.sha256(other).hexdigest()
    marks.store.put(f"launch/files/{digest}", other)
    with pytest.raises(ExecutorError, match="isn't what the launcher sent: not used"):
        marks.fetch(digest)


def test_an_archive_that_swells_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer_replication.diloco.serverless.jobs.container._MAX_CODE_BYTES", 100_000)
    with pytest.raises(ExecutorError, match="more than 100000 bytes: not used"):
        unpack(archive(member("a.py"), data=bytes(200_000)), tmp_path / "target")
    assert not (tmp_path / "target").exists()
