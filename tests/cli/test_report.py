"""`report`: what it takes, what it writes, what it says; and that a store's records are what its replicas saw."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_replication.cli import main
from composer_replication.cli.recorded import policy_from_settings, record_from_store
from composer_replication.cli.report import run_of
from composer_replication.cli.report_live import live_look, tell_end
from composer_replication.cli.view import RunReader
from composer_replication.collective.object_store import keys
from composer_replication.collective.object_store.sealing import begin_epoch
from composer_replication.diloco.round_record import RoundRecord, record_of
from composer_replication.diloco.serverless import ObjectStoreAllReduce
from composer_replication.report import read_file
from composer_replication.store import open_store
from tests.cli.fleets import train
from tests.report.fleet import POLICY, SteppedFleet
from tests.report.samples import run_json
from tests.support.threads import run_threads

LATER = {"wait_seconds", "exchange_seconds", "bytes_sent", "bytes_received", "straggler", "straggler_seconds"}


@pytest.fixture
def runs(tmp_path: Path) -> str:
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(run_json(seed=seed)) + "\n" for seed in (1, 2)))
    return str(path)


def test_a_store_tells_what_its_replicas_saw(tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    fleet = SteppedFleet(place)
    seen = []
    while fleet.replicas[0].left:
        seen.append(fleet.round())
    fleet.finish()
    reader = RunReader(open_store(place))
    reader.refresh()
    values = record_from_store(reader, name="x", source="y")
    assert (values["steps"], values["replicas"], values["elements"], values["ended"]) == (60, 2, 16 * 17, True)
    assert [one["steps"] for one in values["rounds"]] == [one.steps for one in seen]
    assert {one["action"] for one in values["rounds"]} >= {"keep", "grow"}
    for one, summary in zip(values["rounds"], seen, strict=True):
        theirs = record_of(summary).to_json()
        if theirs["observation"] is None:  # nobody went on: only the others' next reports would have told the drift
            theirs["drift"] = theirs["coherence"] = None
            one |= {"drift": None, "coherence": None}
        told = one["replicas"]["0"]
        assert told["wait_seconds"] == summary.wait_seconds and told["bytes_sent"] == summary.bytes_sent
        for record in (one, theirs):
            for replica in record["replicas"].values():
                for name in LATER:
                    replica.pop(name, None)
        assert one == theirs
        RoundRecord.from_json(one)  # what is written can be read, and replayed


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    fleet = SteppedFleet(place)
    reader = RunReader(open_store(place))
    look = live_look(reader, place)
    assert look()["notices"] == ["store: no round is closed yet"]
    assert look()["live"]["words"] == "running: round 0 is open"
    for count in (1, 2):
        fleet.round()
        values = look()
        assert values["live"]["words"] == f"running: round {count} is open" and values["notices"] == []
        assert len(values["runs"][0]["rounds"]["rows"]) == count
    assert [row[0] for row in values["live"]["now"]["rows"]] == ["0", "1"]
    assert run_of(reader, place).notices == ("it still runs: 8 of 60 steps",)
    fleet.finish()
    assert look()["live"] == {"state": "ended", "words": "the run has ended", "now": None}
    fleet.close()


def test_a_run_whose_replicas_are_gone_is_not_called_running(tmp_path: Path, capsys) -> None:
    place = str(tmp_path / "store")
    fleet = SteppedFleet(place, heartbeat_seconds=0.5)
    fleet.round()
    reader = RunReader(open_store(place))
    look = live_look(reader, place)
    assert look()["live"]["state"] == "running"
    fleet.close()
    live = look()["live"]
    assert (live["state"], live["words"]) == ("silent", "not ended, and no replica shows life: round 1 is open")
    assert {row[-1] for row in live["now"]["rows"]} == {"stopped"}
    said = "it has not ended, and no replica shows life: interrupted: 4 of 60 steps"
    assert run_of(reader, place).notices == (said,)
    assert main(["status", place]) == 0 and "not ended, and no replica shows life" in capsys.readouterr().out
    for path in (tmp_path / "store" / "members").iterdir():  # killed: the last beat is of long ago
        beat = json.loads(path.read_text())
        path.write_text(json.dumps({**beat, "state": "running", "time": beat["time"] - 60}))
    live = look()["live"]
    assert live["state"] == "silent" and "silent for" in live["now"]["rows"][0][-1]


def test_a_store_that_holds_another_run_or_none_is_read_anew(tmp_path: Path) -> None:
    place = tmp_path / "store"
    reader = RunReader(open_store(str(place)))
    look = live_look(reader, str(place))
    fleet = SteppedFleet(str(place))
    fleet.round()
    fleet.round()
    fleet.close()
    assert len(look()["runs"][0]["rounds"]["rows"]) == 2
    shutil.rmtree(place)
    values = look()  # it may be a mount that comes back
    assert len(values["runs"][0]["rounds"]["rows"]) == 2 and values["live"]["state"] == "lost"
    assert "store is gone" in values["notices"][0]
    place.mkdir()
    values = look()
    assert values["runs"] == [] and "there is no run in" in values["notices"][0]
    assert values["live"]["state"] == "waiting"
    fleet = SteppedFleet(str(place))
    fleet.round()
    fleet.round()
    assert len(look()["runs"][0]["rounds"]["rows"]) == 2
    shutil.rmtree(place)
    after = SteppedFleet(str(place), replicas=1)
    after.round()
    values = look()  # the run in between was never seen gone
    assert len(values["runs"][0]["rounds"]["rows"]) == 1 and [row[0] for row in values["live"]["now"]["rows"]] == ["0"]
    fleet.close()
    after.close()


def test_the_live_page_of_a_store_that_is_not_there_yet(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    values = live_look(RunReader(open_store(str(tmp_path / "store"))), "store")()
    assert "no fleet.json" in values["notices"][0] and values["runs"] == [] and values["live"]["now"] is None


def test_a_damaged_roster_hides_only_what_comes_after(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, page = tmp_path / "store", tmp_path / "page.html"
    fleet = SteppedFleet(str(place))
    for _ in range(3):
        fleet.round()
    fleet.close()
    (place / keys.roster(2, 0)).write_bytes(b"{half a ros")
    assert main(["report", str(place), "-o", str(page)]) == 0
    told = capsys.readouterr().out
    assert "could be read up to round 1 only" in told and "rounds/00000002/0/roster.json isn't JSON" in told
    assert "could be read up to round 1 only" in page.read_text() and "8 of 60 steps" in told


def test_a_damaged_object_is_named_on_the_live_page_and_hides_nothing_else(tmp_path: Path) -> None:
    place = tmp_path / "store"
    fleet = SteppedFleet(str(place))
    look = live_look(RunReader(open_store(str(place))), str(place))
    fleet.round()
    beat = (place / keys.member(1)).read_bytes()
    (place / keys.member(1)).write_bytes(b"{half a be")
    values = look()
    assert values["live"]["state"] == "running" and values["notices"] == [
        "replica 1: members/1.json isn't JSON (10 bytes)"
    ]
    assert [row[-1].split()[0] for row in values["live"]["now"]["rows"]] == ["training", "unreadable"]
    (place / keys.member(1)).write_bytes(beat)
    fleet.finish()
    (place / keys.member(1)).write_bytes(b"{half a be")
    (place / keys.roster(2, 0)).write_bytes(b"{half a ros")
    values = look()
    assert values["live"]["state"] == "ended" and len(values["runs"][0]["rounds"]["rows"]) == 2
    assert any("rounds/00000002/0/roster.json isn't JSON" in said for said in values["notices"])


def test_a_page_of_files(runs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    page.write_text("an old one")
    assert main(["report", runs, "-o", str(page)]) == 0
    told = capsys.readouterr()
    assert told.out.startswith(f"{page}: made by hand, 2 runs, 2 replicas, 100 steps each, ") and told.err == ""
    assert "AutoLoCo: 20 % fewer rounds; 2.0000 validation loss, ± 0.0000 over 2 runs; 25 % of the repl" in told.out
    html = page.read_text()
    assert html.startswith("<!DOCTYPE html>") and html.count("plotly.js v") >= 1 and "made by hand" in html
    assert {path.name for path in tmp_path.iterdir()} == {"page.html", "runs.jsonl"}  # no draft is left


def test_the_page_is_in_this_folder_unless_said_otherwise(
    runs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", runs, "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["seed"] for one in told] == [1, 2] and not Path("report.html").exists()
    assert main(["report", runs]) == 0 and Path("report.html").is_file()


def test_rounds_are_written_so_that_they_can_be_read(runs: str, tmp_path: Path) -> None:
    written = tmp_path / "rounds.jsonl"
    assert main(["report", runs, "--rounds", str(written), "-o", str(tmp_path / "page.html")]) == 0
    assert len(written.read_text().splitlines()) == 2 + 2 * 8
    before, after = read_file(Path(runs)), read_file(written)
    assert [(one.seed, one.rounds, one.settings) for one in after] == [
        (one.seed, one.rounds, one.settings) for one in before
    ]


def test_the_folder_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    fleet = SteppedFleet(str(folder / "store"))
    fleet.round()
    fleet.finish()
    (folder / "recipe.yaml").write_text(
        "name: x\nmodel: {name: byte_gpt}\ndata: {name: text_bytes}\ntraining: {seed: 5}\n"
    )
    (folder / "summary.json").write_text('{"validation_loss": 1.25, "digests": ["d"], "seconds": 3.5}')
    assert main(["report", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["name"], told["seed"], told["result"]["validation_loss"]) == ("small", 5, 1.25)
    assert told["training"]["model"]["name"] == "byte_gpt" and "output" not in told["training"]


def test_a_run_that_is_resumed_with_a_larger_fleet(tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    train(place, rounds=9, stop_after=5, checkpoint_every=2)
    reader = RunReader(open_store(place))
    for epoch in (False, True):
        if epoch:
            begin_epoch(open_store(place), 3)
        reader.refresh()
        values = record_from_store(reader, name="x", source="y")
        assert [one["round"] for one in values["rounds"]] == [0, 1, 2, 3, 4] and values["steps"] == 9
        assert values["replicas"] == (3 if epoch else 2)
        assert reader.sizes == ({0: 2, 5: 3} if epoch else {0: 2})
        assert {one["observation"]["fleet"] for one in values["rounds"]} == {2}


def test_a_store_that_was_used_for_plain_averaging(tmp_path: Path) -> None:
    replicas = [ObjectStoreAllReduce(i, 2, tmp_path.as_uri(), poll_s=0.02) for i in (0, 1)]
    run_threads([lambda one=one: one.allreduce(torch.ones(3)) for one in replicas])
    run = run_of(RunReader(open_store(str(tmp_path))), str(tmp_path))
    assert (len(run.rounds), run.replicas, run.policy) == (1, 2, "unknown policy")
    assert "policy" not in " ".join(run.notices)
    for one in replicas:
        one.close()


@pytest.fixture
def heeded_interrupts() -> Iterator[None]:
    """A process that was started in the background ignores SIGINT, and so would its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.processes
def test_ctrl_c_ends_the_live_page(tmp_path: Path, heeded_interrupts: None) -> None:
    train(str(tmp_path / "store"), rounds=1)
    command = [sys.executable, "-m", "composer_replication.cli", "status", str(tmp_path / "store"), "--watch", "--web"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().split()[0]
            with urllib.request.urlopen(f"{url}values.json", timeout=60) as answer:
                assert json.loads(answer.read())["live"]["state"] == "ended"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()  # a test that fails waits for nobody
    assert (process.returncode, errors) == (130, "")


def test_the_live_page_says_once_that_the_run_has_ended_and_stays(tmp_path: Path, capsys) -> None:
    place = str(tmp_path / "store")
    fleet = SteppedFleet(place)
    look, looks = live_look(RunReader(open_store(place)), place), list[str]()

    def values() -> Mapping[str, Any]:
        found = look()
        looks.append(found["live"]["state"])
        return found

    teller = threading.Thread(target=tell_end, args=(values, threading.Event(), 0.02, place))
    teller.start()
    fleet.round()
    assert capsys.readouterr().out == ""
    fleet.finish()
    teller.join(60)
    words = "the run has ended; its page stays here until Ctrl-C"
    assert not teller.is_alive() and capsys.readouterr().out.count(words) == 1
    assert looks.count("ended") == 1 and looks[-1] == "ended"


@pytest.mark.parametrize("text", ["", "no JSON\n"])
def test_nothing_that_can_be_read(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    (tmp_path / "empty").mkdir()
    page = tmp_path / "page.html"
    sources = [str(tmp_path / name) for name in ("x.jsonl", "empty", "nowhere")]
    assert main(["report", *sources, "-o", str(page)]) == 1
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3 and "x.jsonl" in told[0] and "no fleet.json" in told[1] and "isn't there" in told[2]
    assert not page.exists()


def test_what_can_be_read_is_shown_beside_what_cannot(runs: str, tmp_path: Path, capsys) -> None:
    page = tmp_path / "page.html"
    assert main(["report", runs, str(tmp_path / "nowhere"), "-o", str(page)]) == 0
    told = capsys.readouterr()
    assert "isn't there" in told.err and "note: " in told.out and "nowhere isn't there" in page.read_text()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["-o", "/no/such/folder/page.html"], "there is no folder /no/such/folder"),
        (["--rounds", "/no/such/folder/r.jsonl"], "there is no folder /no/such/folder"),
    ],
)
def test_wrong_arguments(more: list[str], words: str, runs: str, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", runs, *more]) == 2
    assert words in capsys.readouterr().err and not Path("report.html").exists()


@pytest.mark.parametrize("option", ["-o", "--rounds"])
def test_a_page_that_cannot_be_written_is_told_before_anything_is_read(
    option: str, runs: str, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(tmp_path / "nowhere"), option, str(tmp_path / "folder")]) == 2
    told = capsys.readouterr().err
    assert "can't be written: it is a folder" in told and "nowhere" not in told

    def refuse(self: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", refuse)  # whoever may do anything is refused nothing by a folder's rights
    assert main(["report", str(tmp_path / "nowhere"), option, str(tmp_path / "page.html")]) == 2
    told = capsys.readouterr().err
    assert "html can't be written: Permission denied" in told and "nowhere" not in told
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "runs.jsonl"}  # nor is a draft left


def test_without_plotly_the_extra_is_named(runs: str, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    monkeypatch.chdir(tmp_path)
    assert main(["report", runs]) == 2
    assert "pip install 'composer-replication[report]'" in capsys.readouterr().err
    assert main(["report", runs, "--json"]) == 0


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    told = capsys.readouterr().out
    assert told.count("composer-replication report") >= 5 and "exit code: 0 written" in told
    with pytest.raises(SystemExit):
        main(["report"])
    assert "SOURCE" in capsys.readouterr().err


def test_a_policy_is_made_again_of_what_the_fleet_agreed_on() -> None:
    for settings in (POLICY.settings(), {"policy": "fixed", "horizon": 7}, {"policy": "linear", "increment": 3}):
        policy, problem = policy_from_settings(settings)
        assert policy is not None and problem == "" and policy.settings() == settings
    qsr = {"policy": "qsr", "base_horizon": 5, "warmup_steps": 2, "alpha": 0.5}
    policy, _ = policy_from_settings(qsr)
    assert policy is not None and policy.settings() == qsr
    assert policy_from_settings({"policy": "mine"})[1].startswith("its policy 'mine' isn't one of this package")
    assert "can't be asked again" in policy_from_settings({"policy": "autoloco", "base_horizon": -1})[1]
