"""What is said of places that can't be a store: the reason and the remedy, and no secret."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from composer_replication.errors import StoreError
from composer_replication.store import LocalStore, open_store


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        (" ", "empty"),
        ("\0", "NUL byte"),
        ("s3://buc\0ket/run", "NUL byte"),
        ("file:///data/a%00b", "NUL byte"),
        ("file:relative", "absolute"),
        ("s3:/bucket/run?token=verysecret", "two slashes.*s3://bucket/run$"),
        ("file:///data/%2e%2e/run", "%2e%2e.*stands for '..'"),
        ("file:///data/a%2F..%2Frun", "stands for 'a/../run'"),
        ("s3://bucket/%2E%2E/run", "stands for '..'"),
        ("file:///data/run#verysecret", "nothing after it"),
        ("file:///data/run?verysecret", "nothing after it"),
        ("file://me:verysecret@host/run", "no credentials"),
        ("s3://bucket/run#verysecret", "s3://bucket/run: .* no fragment"),
        ("s3://bucket/run?region=x#verysecret", "s3://bucket/run: .* no fragment"),
        ("s3://AKIA:very/verysecret@bucket/run", "credentials don't belong"),
        ("AKIA:verysecret@bucket", "credentials don't belong"),
        ("AKIA:very/verysecret@bucket", "credentials don't belong"),
        ("http://host/run?sig=verysecret", "http:// can only be read"),
        ("HTTPS://host/run?sig=verysecret", "https:// can only be read"),
    ],
)
def test_places_that_are_refused(uri: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        open_store(uri)
    assert "verysecret" not in str(caught.value)


def test_one_slash_is_as_good_as_three(tmp_path: Path) -> None:
    open_store(f"file:{tmp_path}/run").put("k", b"v")
    assert open_store(f"file://{tmp_path}/run").get("k") == b"v"


def test_paths_that_only_look_like_a_login_are_fine(tmp_path: Path) -> None:
    assert open_store(f"{tmp_path}/a:b@c").uri.endswith("/a%3Ab%40c")


def test_a_store_below_a_file_says_which(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for below in ("file/sub", "file/sub/deeper"):
        with pytest.raises(StoreError, match=f"{tmp_path}/file above it is a file, not a folder") as caught:
            open_store(f"file://{tmp_path}/{below}")
        assert "mkdir" not in str(caught.value)


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="choose a shorter one"):
        open_store(str(tmp_path / ("n" * 300)))


def test_a_read_only_file_system_has_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)

    def refuses(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuses)
    for attempt in (lambda: store.put("new/key", b""), lambda: LocalStore(tmp_path / "run")):
        with pytest.raises(StoreError, match="mounted read-only: have it mounted for writing, or choose another"):
            attempt()
