"""`rounds.jsonl`: whole lines at any moment, each round once, through restarts and new epochs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from composer_replication.cli.rounds_file import ROUNDS, RoundsFile
from composer_replication.cli.view import RunReader
from composer_replication.collective.object_store.sealing import begin_epoch
from composer_replication.diloco.round_record import RoundRecord
from composer_replication.store import open_store
from tests.cli.fleets import train


def lines(folder: Path) -> list[RoundRecord]:
    text = (folder / ROUNDS).read_text()
    assert text.endswith("\n")
    return [RoundRecord.from_json(json.loads(line)) for line in text.splitlines()]


def read(place: str) -> RunReader:
    reader = RunReader(open_store(place))
    reader.refresh()
    return reader


def test_a_line_for_each_round_and_what_is_known_later_comes_in_later(tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    file = RoundsFile(tmp_path, "run")
    file.update(RunReader(open_store(place)))
    assert not (tmp_path / ROUNDS).exists(), "nothing is known yet"
    train(place, rounds=9, stop_after=3)
    reader = read(place)
    file.update(reader)
    records = lines(tmp_path)
    assert [record.round for record in records] == [0, 1, 2]
    told = [record.observed.replicas[1] for record in records]
    assert all("train_seconds" in one for one in told)
    assert ["bytes_sent" in one for one in told] == [True, True, False], "of the last one the next round tells"
    before = (tmp_path / ROUNDS).stat().st_ino
    file.update(reader)
    assert (tmp_path / ROUNDS).stat().st_ino == before, "nothing new, nothing written"
    # Killed in the middle of writing: the file is the old one; its successor finishes it, and repeats nothing.
    (tmp_path / f".{ROUNDS}.1").write_text('{"version": 2, "rou')
    other = tmp_path / "other"
    other.mkdir()
    train(str(other / "store"), rounds=4)
    again = RoundsFile(other, "run")
    (other / ROUNDS).write_text((tmp_path / ROUNDS).read_text() + '{"version": 2, "rou')
    again.update(read(str(other / "store")), at_end=True)
    done = lines(other)
    assert [record.round for record in done] == [0, 1, 2, 3]
    assert all("bytes_sent" in record.observed.replicas[0] for record in done), "the results tell of the last round"
    assert done[-1].observed.observation is None and done[-1].position == 4


def test_rounds_that_a_new_epoch_has_undone_are_gone(tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    train(place, rounds=9, stop_after=6, checkpoint_every=2)
    file, reader = RoundsFile(tmp_path, "run"), read(place)
    file.update(reader)
    assert len(lines(tmp_path)) == 6
    first = begin_epoch(open_store(place), 3).first
    reader.refresh()
    file.update(reader)
    assert [record.round for record in lines(tmp_path)] == list(range(first))


def test_a_file_that_can_t_be_written_is_told_once_and_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(tmp_path / "store")
    train(place, rounds=2)
    gone = RoundsFile(tmp_path / "gone", "run")
    gone.update(read(place))
    gone.update(read(place))
    assert capsys.readouterr().err.count("isn't up to date: FileNotFoundError") == 1
    os.mkdir(tmp_path / "gone")
    gone.update(read(place))
    assert len(lines(tmp_path / "gone")) == 2
