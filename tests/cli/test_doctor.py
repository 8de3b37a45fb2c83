"""`doctor`: the probe for people and for programs, and its exit codes."""

from __future__ import annotations

import json

import pytest

from composer_replication.cli import main
from composer_replication.cli.doctor import parse_count, parse_size
from composer_replication.errors import StoreRefused
from composer_replication.store import LocalStore, MemoryStore, open_store, register_scheme


def test_a_folder_for_programs(tmp_path, capsys):
    arguments = ["--parameters", "1.3B", "--replicas", "8", "--codec", "int8", "--largest", "1MB", "--json"]
    assert main(["doctor", str(tmp_path), *arguments]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert answer["fit"] and {finding["verdict"] for finding in answer["findings"]} == {"ok"}
    expected = answer["expected"]
    assert expected["mode"] == "sharded" and expected["seconds"] > 0
    # int8 is 1 + 4/4096 bytes a value; each sends it once and its eighth of the mean, and receives 2 * 7/8 of it.
    assert expected["payload_bytes"] == pytest.approx(1.3e9 * (1 + 4 / 4096), rel=1e-4)
    assert expected["up_bytes"] == pytest.approx(expected["payload_bytes"] * 9 / 8, rel=0.01)
    assert expected["down_bytes"] == pytest.approx(expected["payload_bytes"] * 14 / 8, rel=0.01)
    assert LocalStore(tmp_path).list("") == []


def test_a_folder_that_was_not_there_is_gone_again_and_its_cache_is_named(tmp_path, capsys):
    assert main(["doctor", str(tmp_path / "new"), "--largest", "100k"]) == 0
    assert not (tmp_path / "new").exists()
    assert "this machine's" in capsys.readouterr().out
    assert main(["doctor", str(tmp_path), "--largest", "100k", "--json"]) == 0
    assert tmp_path.is_dir()


def test_memory_for_people(capsys):
    assert main(["doctor", "memory://doctor", "--largest", "100k", "--parameters", "10M", "--replicas", "2"]) == 0
    captured = capsys.readouterr()
    for words in (
        "create-if-absent",
        "atomic visibility",
        "latency",
        "speed",
        "this store can hold a run",
        "a round of 10M",
    ):
        assert words in captured.out
    assert "writers that create the same key" in captured.err
    assert open_store("memory://doctor").list("") == []


def test_a_store_that_cannot_hold_a_run(capsys):
    class Bucket(MemoryStore):
        def put_if_absent(self, key, data):
            raise StoreRefused("this store can't create an object only once")

    store = Bucket()
    register_scheme("bucket", lambda uri, create: store)
    assert main(["doctor", "bucket://x", "--largest", "100k"]) == 1
    out = capsys.readouterr().out
    assert "NOT hold a run" in out and "fails" in out
    assert main(["doctor", "bucket://x", "--largest", "100k", "--blobs"]) == 0
    assert "hold a run's blobs" in capsys.readouterr().out


def test_a_store_that_is_not_there_says_why(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["doctor", str(tmp_path / "file")]) == 2
    assert "is a file: name a folder" in capsys.readouterr().err
    assert main(["doctor", str(tmp_path), "--parameters", "big"]) == 2
    assert "--parameters must be a number like 1.3B" in capsys.readouterr().err
    assert main(["doctor", str(tmp_path), "--replicas", "0"]) == 2


def test_numbers_as_people_write_them():
    assert [parse_count("n", text) for text in ("1.3B", "350M", "124000000", "7k")] == [
        1300000000,
        350000000,
        124000000,
        7000,
    ]
    assert [parse_size("n", text) for text in ("32MB", "1GB", "100k", "5")] == [32000000, 1000000000, 100000, 5]
    for text in ("", "-1", "1.3X", "nan", "inf", "B"):
        with pytest.raises(ValueError, match="must be a number like"):
            parse_count("n", text)
