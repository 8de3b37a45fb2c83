"""A lock keeps one out while another has it, and nobody where the file system has none."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest

from composer_replication.diloco.serverless.locks import locked


def test_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with locked(path) as first, locked(path) as second:
        assert (first, second) == (True, False)
        assert [one.name for one in tmp_path.iterdir()] == [".lock"]  # what was tried beside it is gone
    with locked(path) as third:
        assert third


def test_who_waits_gets_it_when_it_is_given_back(tmp_path: Path) -> None:
    path, held, seen = tmp_path / ".lock", threading.Event(), list[bool]()

    def second() -> None:
        held.wait(60)
        waits.set()
        with locked(path, wait_seconds=60.0) as free:
            seen.append(free)

    waits, thread = threading.Event(), threading.Thread(target=second)
    thread.start()
    with locked(path):
        held.set()
        waits.wait(60)
        assert seen == []
    thread.join(60)
    assert seen == [True]


@pytest.mark.filterwarnings("ignore:flock not supported")
@pytest.mark.parametrize("reason", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EAGAIN])
@pytest.mark.parametrize("left", [None, "1\nanother-machine\n"])
def test_a_file_system_without_locks(
    left: str | None, reason: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EAGAIN: what older versions of filelock make of all of them."""

    def refuse(*_: object) -> None:
        raise OSError(reason, os.strerror(reason))

    path = tmp_path / ".lock"
    if left is not None:
        path.write_text(left)
    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(path) as first, locked(path, wait_seconds=600.0) as second:
        assert first and second
