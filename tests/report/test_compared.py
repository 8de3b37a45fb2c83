"""Runs that are compared: their table, what else sets them apart, and losses that are no numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from composer_replication.report import payload, run_from_json
from composer_replication.report.facts import facts_of
from composer_replication.report.groups import group_runs
from composer_replication.report.measures import diverged
from tests.report.samples import run_json

FIVE = {"name": "fixed", "settings": {"horizon": 5}}
NESTEROV = {"kind": "nesterov", "lr": 0.7, "adapt_lr": True}


def page_of(*values: dict[str, Any]) -> dict[str, Any]:
    return payload([run_from_json(one, source=f"file {index}") for index, one in enumerate(values)])


def loss_lines(*values: dict[str, Any]) -> list[str]:
    groups = group_runs([run_from_json(one, source="a file") for one in values])[0]
    return facts_of(groups[0], groups)[1]["lines"]


def column(page: dict[str, Any], name: str) -> list[str]:
    table = page["comparison"]
    return [row[table["columns"].index(name)] for row in table["rows"]]


def test_runs_of_unlike_size_are_called_so_and_have_columns_for_it() -> None:
    short = run_json("fixed", intervals=(10,) * 6, steps=60, replicas=3)
    page = page_of(run_json(), short)
    assert page["notices"] == [
        "the runs differ in steps and replicas (AutoLoCo: 100 steps, 2 replicas; Fixed interval of 10: 60 steps, "
        "3 replicas): losses, bytes and times of unlike runs can't be compared"
    ]
    assert column(page, "steps") == ["100", "60"] and column(page, "replicas") == ["2", "3"]
    alike = page_of(run_json(), run_json("fixed"))
    assert alike["notices"] == [] and not {"steps", "replicas", "outer momentum"} & {*alike["comparison"]["columns"]}


def test_what_a_loss_differs_by_beside_the_intervals_is_said() -> None:
    adaptive = run_json(outer={**NESTEROV, "momentum": 0.7})
    diloco = run_json("fixed", outer={**NESTEROV, "lr": 0.8, "momentum": 0.9, "adapt_lr": False}, codec="float32")
    assert loss_lines(adaptive, diloco)[-1] == (
        "The intervals aren't all that differs: outer momentum 0.7, not 0.9; outer learning rate 0.7, not "
        "0.8; codec int8, not float32."
    )
    assert column(page_of(adaptive, diloco), "outer momentum") == ["0.7", "0.9"]
    same = run_json("fixed", outer={**NESTEROV, "momentum": 0.7})
    assert "lower than" in loss_lines(adaptive, same)[-1] or "higher than" in loss_lines(adaptive, same)[-1]


def test_an_unfinished_run_is_compared_as_such() -> None:
    cut = run_json(validation=None)
    cut["rounds"] = cut["rounds"][:5]
    page = page_of(cut, run_json("fixed", validation=None))
    assert column(page, "steps") == ["58 of 100", "100"]
    assert "58 of 100 steps, not 100" in page["groups"][0]["facts"][1]["lines"][-1]
    assert page_of(cut)["subtitle"].startswith("2 replicas, 58 of 100 steps each")


def ddp(losses: list[list[float | None]]) -> dict[str, Any]:
    return run_json("ddp", codec="float32", outer=None) | {"losses": losses, "rounds": []}


def test_data_parallel_diloco_and_autoloco_in_one_table() -> None:
    adaptive = run_json(time={"seconds": 90.0, "replicas": []})
    for one in adaptive["rounds"]:
        one["replicas"] = {}
    page = page_of(ddp([[50, 2.0], [100, 1.5]]), run_json("fixed"), adaptive)
    assert column(page, "") == ["Data parallel", "Fixed interval of 10", "AutoLoCo"]
    assert column(page, "rounds") == ["100", "10", "8"] and column(page, "of fixed") == ["1000 %", "100 %", "80 %"]
    assert column(page, "sent")[:2] == ["800 MB", "20 kB"]  # two replicas, a million elements of 4 bytes, 100 steps
    assert column(page, "training loss") == ["1.5000", "1.0000", "1.0000"]
    assert column(page, "wall-clock") == ["–", "1 min 40 s", "1 min 30 s"]  # the rounds', or what simulate worked out
    assert "one float32 gradient of each replica in each step" in page["comparison"]["note"]
    assert "one float32 gradient of each replica in each step" in page["groups"][0]["facts"][0]["lines"][1]
    alone = page_of(ddp([[50, 2.0], [100, 1.5]]), adaptive | {"time": None})["comparison"]["columns"]
    assert not {"wall-clock", "training"} & {*alone} and "sent" in alone  # what nobody knows takes no room
    assert "Data parallel" not in page_of(run_json(), run_json("fixed"))["comparison"]["note"]


def test_of_fixed_is_against_the_fixed_run_that_is_there() -> None:
    """Its interval is 5: 20 rounds, of which the adaptive run, whose base horizon is 10, takes 8."""
    twice = run_json("fixed", intervals=(5,) * 20) | {"policy": FIVE}
    assert column(page_of(run_json(), twice), "of fixed") == ["40 %", "100 %"]


def test_the_fixed_run_whose_other_settings_are_nearest_is_the_baseline() -> None:
    far = run_json("fixed", intervals=(5,) * 20, codec="float32", outer={"kind": "average", "lr": 1.0})
    far, smaller = {**far, "policy": FIVE}, run_json("fixed", intervals=(4,) * 25, replicas=3)
    runs = [run_from_json(one, source="a file") for one in (run_json(), smaller, far, run_json("fixed"))]
    groups = group_runs(runs)[0]
    saved, loss, _ = facts_of(groups[0], groups)
    assert saved["lines"][0] == "8 rounds; a fixed interval of 10 steps takes 10."
    assert any("than Fixed interval of 10" in line for line in loss["lines"])
    saved = facts_of(groups[0], groups[:3])[0]  # without the nearest one it is the other of as many replicas
    assert saved["lines"][0] == "8 rounds; a fixed interval of 5 steps takes 20."


@pytest.mark.parametrize("how", ["null", "NaN", "nobody"])
def test_a_run_that_diverged_says_from_where_on(how: str) -> None:
    values = run_json(validation=None)
    for one in values["rounds"][5:]:
        one["loss"] = float("nan") if how == "NaN" else None
        for told in one["replicas"].values():
            told.pop("loss")
        if how == "nobody":
            one |= {"members": [], "absent": {"0": "the mean is not finite", "1": "the mean is not finite"}}
    run = run_from_json(json.loads(json.dumps(values)), source="a file")
    found = diverged(run)
    assert found is not None and found.round == 5
    loss = facts_of(*(lambda groups: (groups[0], groups))(group_runs([run])[0]))[1]
    assert (loss["answer"], loss["unit"]) == ("2.5000", "last finite training loss")
    assert loss["lines"] == ["Losses are not finite from round 5 (step 72) on."]
    page = page_of(values, run_json("fixed", validation=None))
    assert any("it diverged: its losses are not finite from round 5 (step 72) on" in one for one in page["notices"])
    assert column(page, "training loss") == ["not finite from round 5 (step 72) on", "1.0000"]
    assert not any("than Fixed" in line for line in page["groups"][0]["facts"][1]["lines"])


def test_losses_that_were_never_told_or_of_a_round_without_anybody_are_no_divergence() -> None:
    quiet, idle = run_json(), run_json()
    for one in quiet["rounds"]:
        one["loss"] = None
        for told in one["replicas"].values():
            told.pop("loss")
    idle["rounds"][-1] |= {"members": [], "loss": None, "absent": {"0": "not ready in time", "1": "not ready in time"}}
    for values in (run_json(), quiet, idle):
        assert diverged(run_from_json(values, source="a file")) is None
    page = page_of(ddp([[50, 2.0], [100, None]]))
    assert page["notices"] == ["made by hand: it diverged: its losses are not finite from step 100 on"]
