"""What a store tells people, read while rounds come and go."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from composer_replication.cli import main
from composer_replication.cli.view import RunReader
from composer_replication.diloco.serverless import ObjectStoreAllReduce
from composer_replication.errors import RoundAborted
from composer_replication.store import LocalStore, open_store
from tests.collective.conformance import SCALAR, contribution
from tests.collective.object_store.helpers import Fleet
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


def test_a_loss_that_is_no_number_is_null_in_json(tmp_path, capsys):
    with Fleet(2, LocalStore(tmp_path / "store")) as fleet:

        def one(replica: int) -> None:
            part = contribution(replica, 0, SCALAR, torch.ones(1))
            fleet.all[replica].average(replace(part, report=replace(part.report, metrics={"loss": math.nan})))

        run_threads([lambda r=r: one(r) for r in (0, 1)])
    assert main(["status", str(tmp_path / "store"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} isn't JSON"))
    assert [row["loss"] for row in told["replicas"]] == [None, None]
