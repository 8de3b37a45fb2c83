"""`gc`: shows and deletes only what nobody can need any more."""

from __future__ import annotations

import json

import pytest
import torch

from composer_replication.cli import main
from composer_replication.collective.object_store import checkpoints, keys
from composer_replication.collective.object_store.garbage import KEEP_ROUNDS, Collector
from composer_replication.collective.object_store.history import closed_roster
from composer_replication.collective.object_store.tidy import applied_by_all
from composer_replication.store import LocalStore, PrefixedStore, open_store
from tests.cli.fleets import train
from tests.collective.object_store.helpers import Fleet


@pytest.fixture
def unkept(monkeypatch):
    """A fleet whose replicas tidy nothing, as killed ones don't."""
    monkeypatch.setattr(Collector, "collect", lambda self, roster: None)


def command(capsys, *arguments, code=0):
    assert main(["gc", *map(str, arguments)]) == code, capsys.readouterr().err
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def rounds_with_blobs(store) -> set[int]:
    return {keys.round_of(key)[0] for key in store.list("rounds/") if keys.is_blob(key)}


def pointers(store) -> list[str]:
    return [key for key in store.list("") if not keys.is_blob(key)]


def test_an_open_run_keeps_its_safe_window(unkept, tmp_path, capsys):
    folder = tmp_path / "runs" / "one"
    folder.parent.mkdir()
    train(folder.as_uri(), rounds=20, checkpoint_every=3, stop_after=8, mode="sharded")
    store, before = LocalStore(folder), LocalStore(folder).list("")
    text = command(capsys, folder)
    assert "8 rounds closed, not finished, newest checkpoint of round 6" in text and "dry run" in text
    assert store.list("") == before
    answer = json.loads(command(capsys, folder, "--json", "--list"))
    # min(checkpoint 6, all took part in round 7) - 2
    assert (answer["floor"], answer["deleted"]) == (6 - KEEP_ROUNDS, False)
    assert answer["bytes"] == sum((folder / key).stat().st_size for key in answer["keys"])
    assert all(keys.is_blob(key) for key in answer["keys"])
    kept = pointers(store)
    assert f"deleted {answer['objects']} objects" in command(capsys, folder, "--delete")
    assert store.list("") == [key for key in before if key not in answer["keys"]] and pointers(store) == kept
    assert rounds_with_blobs(store) == {4, 5, 6, 7}
    assert {int(key.split("/")[1]) for key in store.list("checkpoints/") if keys.is_blob(key)} == {3, 6}
    assert "nothing may go" in command(capsys, folder, "--delete")


def test_what_stays_is_enough_to_come_back_and_to_join(unkept, tmp_path, capsys):
    """The fleet goes on after a collection by hand, and ends with the weights of one that was left alone."""
    ends = []
    for name in ("tidied", "left"):
        folder = tmp_path / name
        train(folder.as_uri(), rounds=6, checkpoint_every=2, stop_after=5)
        if name == "tidied":
            command(capsys, folder, "--delete")
        # Started again without any state of its own: joins from the newest checkpoint, and follows the round since.
        ends.append(train(folder.as_uri(), rounds=6, checkpoint_every=2)[-1])
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), name


def test_a_replica_that_missed_a_round_keeps_the_window_open(unkept):
    with Fleet(3, failure_policy="skip", tolerated_misses=9, timeout_seconds=1.0, checkpoint_every=1) as fleet:
        for number in range(3):
            fleet.round(number, {0: 1.0, 1: 2.0, 2: 3.0})
        fleet.round(3, {0: 1.0, 1: 2.0})
        run = json.loads(fleet.store.get(keys.FLEET))["nonce"]
        last = closed_roster(fleet.store, run, 3)
        assert last is not None and last.roster.expected_next == (0, 1, 2) and last.roster.present == {0, 1}
        assert applied_by_all(fleet.store, run, 4) == 2


def test_beyond_the_safe_window_is_refused(unkept, tmp_path, capsys):
    folder = tmp_path / "one"
    train(folder.as_uri(), rounds=20, checkpoint_every=2, stop_after=6)
    store = LocalStore(folder)
    before = store.list("")
    error = command(capsys, folder, "--before", 5, "--delete", code=2)
    assert "--before 5 is beyond what is safe" in error and "comes back" in error
    error = command(capsys, folder, "--only-final", "--delete", code=2)
    assert "isn't finished" in error
    assert store.list("") == before
    command(capsys, folder, "--before", 1, "--delete")
    assert rounds_with_blobs(store) == {1, 2, 3, 4, 5}


def test_of_a_finished_run_only_what_the_last_weights_need(unkept, tmp_path, capsys):
    folder = tmp_path / "one"
    train(folder.as_uri(), rounds=7, checkpoint_every=3)
    store = LocalStore(folder)
    newest = checkpoints.rounds(store)[0]
    assert "finished" in command(capsys, folder, "--delete")
    assert rounds_with_blobs(store) == set(range(newest, 7))
    command(capsys, folder, "--only-final", "--delete")
    assert {int(key.split("/")[1]) for key in store.list("checkpoints/") if keys.is_blob(key)} == {newest}
    assert main(["export", str(folder), "-o", str(tmp_path / "m.pt")]) == 0
    store.delete([next(key for key in store.list(keys.checkpoint(newest)) if keys.is_blob(key))])
    assert "isn't whole" in command(capsys, folder, "--only-final", code=2)


def test_only_this_run(unkept, tmp_path, capsys):
    """A run inside another one's folder, a run beside it, and things that merely look alike."""
    whole = LocalStore(tmp_path / "store")
    for run in ("one", "one/inner", "two"):
        train(PrefixedStore(whole, run), rounds=9, checkpoint_every=3, stop_after=8)
    whole.put("one/notes/rounds/00000000/0/in/0.1/0", b"not ours")
    whole.put("one/doctor-1234/x", b"left by a probe")
    others = [key for key in whole.list("") if not key.startswith("one/") or key.startswith(("one/inner", "one/notes"))]
    text = command(capsys, tmp_path / "store" / "one", "--delete")
    assert "left by a probe of the store" in text and "one/doctor-1234/x" not in whole.list("")
    assert [key for key in whole.list("") if key in set(others)] == others
    assert "no run in" in command(capsys, tmp_path / "store", "--delete", code=2)


def test_in_two_stores(unkept, capsys):
    blobs, control = "memory://gc-blobs", "memory://gc-control"
    train(blobs, control=control, rounds=9, checkpoint_every=3, stop_after=8)
    kept = open_store(control).list("")
    assert "no run in" in command(capsys, blobs, code=2)
    answer = json.loads(command(capsys, blobs, "--control", control, "--delete", "--json"))
    assert answer["deleted"] and answer["objects"] > 0 and answer["bytes"] > 0
    assert open_store(control).list("") == kept and rounds_with_blobs(open_store(blobs)) == {4, 5, 6, 7}
