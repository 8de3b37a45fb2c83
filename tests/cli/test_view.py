"""What a store tells people, read while rounds come and go."""

from __future__ import annotations

import json
import math
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from composer_replication.autoloco import FixedPolicy
from composer_replication.autoloco.values import Preview
from composer_replication.cli import main
from composer_replication.cli.view import RunReader
from composer_replication.collective.object_store import ObjectStoreCollective
from composer_replication.collective.object_store.sealing import begin_epoch
from composer_replication.diloco.loop import OuterLoop
from composer_replication.diloco.serverless import ObjectStoreAllReduce
from composer_replication.errors import RoundAborted
from composer_replication.store import LocalStore, open_store
from tests.cli.fleets import Model, train
from tests.collective.conformance import SCALAR, contribution
from tests.collective.object_store.helpers import Fleet
from tests.report.fleet import SteppedFleet
from tests.support.threads import run_threads


def test_rounds_are_read_as_they_come_and_an_abort_is_told(tmp_path):
    reader = RunReader(open_store(str(tmp_path)))
    reader.refresh()
    assert reader.fleet is None and reader.view("empty").rows == []
    replicas = [ObjectStoreAllReduce(i, 2, tmp_path.as_uri(), poll_s=0.02, timeout_s=0.5) for i in (0, 1)]

    def round() -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda one: one.allreduce(torch.ones(3)), replicas))

    for count in (1, 2, 3):
        round()
        reader.refresh()
        assert [r.round for r in reader.rounds] == list(range(count))
    assert [row.state for row in reader.view("run").rows] == ["training"] * 2, "whatever the heartbeats don't say yet"
    assert reader.rounds[-1].members == (0, 1) and reader.rounds[-1].position == 3
    assert [row.replica for row in reader.view("run").rows] == [0, 1] and reader.trouble == ""
    with pytest.raises(RoundAborted):
        replicas[0].allreduce(torch.ones(3))
    reader.refresh()
    assert len(reader.rounds) == 3 and reader.trouble and not reader.ended
    for one in replicas:
        one.close()


class Counting(LocalStore):
    """Remembers what was read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read: list[str] = []

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        self.read.append(key)
        return super().get(key, max_bytes=max_bytes)

    def reads(self, reader: RunReader, times: int = 1) -> int:
        """Of fleet.json, in so many looks."""
        self.read.clear()
        for _ in range(times):
            reader.refresh()
        return self.read.count("fleet.json")


def test_fleet_json_which_may_be_large_is_seldom_read_again(tmp_path: Path) -> None:
    store, now = Counting(tmp_path), [100.0]
    reader = RunReader(store, clock=lambda: now[0])
    assert store.reads(reader, 3) == 6, "it isn't there yet"
    fleet = SteppedFleet(str(tmp_path))
    assert store.reads(reader, 4) <= 3, "none is closed yet"
    fleet.round()
    assert store.reads(reader, 4) == 0 and len(reader.rounds) == 1
    now[0] += 11
    assert store.reads(reader, 4) == 1
    fleet.close()
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    reader.refresh()
    assert reader.fleet is None and reader.rounds == []
    for count in (1, 0, 1, 1):  # another run in its place: of fewer rounds, of more, of as many
        fleet = SteppedFleet(str(tmp_path))
        for _ in range(count):
            fleet.round()
        reader.refresh()
        assert len(reader.rounds) == count and reader.run == json.loads((tmp_path / "fleet.json").read_text())["nonce"]
        fleet.close()
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
    begin = SteppedFleet(str(tmp_path))
    begin.round()
    begin.close()
    reader.refresh()
    begin_epoch(store, 3)
    assert store.reads(reader) == 1 and store.reads(reader, 4) == 0, "nobody of the next epoch has started"


def test_a_loss_that_is_no_number_is_null_in_json(tmp_path, capsys):
    with Fleet(2, LocalStore(tmp_path / "store")) as fleet:

        def one(replica: int) -> None:
            part = contribution(replica, 0, SCALAR, torch.ones(1))
            fleet.all[replica].average(replace(part, report=replace(part.report, metrics={"loss": math.nan})))

        run_threads([lambda r=r: one(r) for r in (0, 1)])
    assert main(["status", str(tmp_path / "store"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} isn't JSON"))
    assert [row["loss"] for row in told["replicas"]] == [None, None]


def test_a_run_that_is_being_resumed_and_in_which_nobody_has_started_yet(tmp_path, capsys):
    """The launcher may have died just then: the run is there still, and can be looked at, tidied and exported."""
    place, weights = str(tmp_path / "store"), str(tmp_path / "model.pt")
    train(place, rounds=9, stop_after=5, checkpoint_every=2)
    reader = RunReader(open_store(place))
    reader.refresh()
    assert begin_epoch(open_store(place), 3).first == 5
    reader.refresh()
    for one in (reader, RunReader(open_store(place))):
        one.refresh()
        assert (len(one.rounds), one.replicas, one.ids) == (5, 3, (0, 1, 2))
        assert [row.state for row in one.view("").rows] == ["training", "training", "not seen"]
    assert main(["status", place]) == 0
    told = capsys.readouterr().out
    assert "5 rounds closed" in told and told.count("not seen") == 1
    assert main(["gc", place]) == 0 and "5 rounds closed, not finished" in capsys.readouterr().out
    assert main(["export", place, "-o", weights]) == 0 and "the start of round 4" in capsys.readouterr().out
    run_threads([lambda r=r: start(place, r) for r in range(3)])
    reader.refresh()
    assert reader.replicas == 3 and reader.fleet is not None and reader.fleet["replicas"] == 3


def start(place: str, replica: int) -> None:
    """Begin with it, and no more."""
    policy = FixedPolicy(horizon=1)
    collective = ObjectStoreCollective(place, replica=replica, replicas=3, poll_seconds=0.01, checkpoint_every=2)
    loop = OuterLoop(Model(), collective, policy=policy, chunk_elements=4096)
    loop.start(Preview(steps=policy.grid, sums=(1.0,), next_lr=1.0, remaining=9))
    assert loop.round == 5
    loop.close()


def test_a_runs_folder_names_the_second_store_and_the_key(tmp_path, capsys):
    blobs, pointers, key = (str(tmp_path / name) for name in ("blobs", "pointers", "key"))
    Path(key).write_text("k" * 40)
    os.chmod(key, 0o600)
    train(blobs, rounds=1, control=pointers, signing_key=key)
    recipe = tmp_path / "run" / "recipe.yaml"
    recipe.parent.mkdir()
    recipe.write_text(
        "name: x\nmodel: {name: byte_gpt}\ndata: {name: text_bytes}\n"
        f"store: {{uri: {blobs}, control: {pointers}, signing_key_file: {key}}}\n"
    )
    for command in (["status"], ["gc"], ["export", "-o", str(tmp_path / "model.pt")]):
        assert main([command[0], str(recipe.parent), *command[1:]]) == 0, capsys.readouterr().err
    os.rename(key, key + "2")  # the recipe's own is of no use here: what is given counts
    given = ["--control", pointers, "--signing-key-file", key + "2"]
    assert main(["gc", blobs, *given]) == 0 and main(["status", blobs, *given]) == 0


@pytest.mark.parametrize("command", [["gc"], ["status"], ["export", "-o", "model.pt"]])
def test_a_second_store_that_is_not_named(tmp_path, capsys, command):
    blobs, pointers = (str(tmp_path / name) for name in ("blobs", "pointers"))
    train(blobs, rounds=1, control=pointers)
    assert main([command[0], blobs, *command[1:]]) == 2
    assert "(--control)" in capsys.readouterr().err
