"""The table of the rounds: who took part, who was waited for, who had gone. And what a fixed interval is drawn as."""

from __future__ import annotations

from typing import Any

import pytest

from composer_replication.report import payload, run_from_json
from composer_replication.report.tables import rounds_table
from tests.report.samples import run_json


def cells(values: dict[str, Any], column: str) -> list[str]:
    """Of the rounds, the first one first."""
    table = rounds_table(run_from_json(values, source="a file"))
    return [row[table["columns"].index(column)] for row in table["rows"]][::-1]


def without(one: dict[str, Any], *replicas: int, why: str = "") -> None:
    one["members"] = [member for member in one["members"] if member not in replicas]
    for replica in replicas:
        one["replicas"].pop(str(replica))
        if why:
            one["absent"][str(replica)] = why


def test_who_left_and_who_is_no_longer_expected_is_said() -> None:
    values = run_json()
    rounds = values["rounds"]
    for one in rounds:
        one["members"].append(2)
        one["replicas"]["2"] = dict(one["replicas"]["1"])
    without(rounds[2], 1, why="not ready in time")
    for one in rounds[3:]:
        without(one, 1)  # it had its chance
    for one in rounds[5:]:
        without(one, 2)  # its last interval was averaged
    rounds[7]["members"].append(1)  # and it is back
    assert cells(values, "took part") == [
        "0, 1, 2",
        "0, 1, 2",
        "0, 2; without 1: not ready in time",
        "0, 2; without 1: no longer expected",
        "0, 2; without 1: no longer expected",
        "0; without 1: no longer expected; without 2: left",
        "0; without 1: no longer expected; without 2: left",
        "0, 1; without 2: left",
    ]


def test_one_whose_interval_was_not_averaged_is_there_all_the_same() -> None:
    values = run_json()
    values["rounds"][4]["members"] = [0]
    values["rounds"][4]["absent"] = {"1": "outlier: norm 9, median 1"}
    assert cells(values, "took part")[4:6] == ["0; without 1: outlier: norm 9, median 1", "0, 1"]


def test_who_came_last_is_in_the_table_and_in_the_timeline() -> None:
    values = run_json()
    values["rounds"][3]["replicas"]["1"] |= {"straggler": 0.0, "straggler_seconds": 75.0}
    for told in values["rounds"][5]["replicas"].values():
        told["train_seconds"] = 9.0  # nobody was waited for
    assert cells(values, "last to come") == ["1 (3.0 s)"] * 3 + ["0 (1 min 15 s)", "1 (3.0 s)", "–"] + ["1 (3.0 s)"] * 2
    charts = payload([run_from_json(values, source="a file")])["runs"][0]["charts"]
    training = next(one for one in charts if one["id"] == "timeline")["variants"][0]["data"][0]
    hover = dict(zip(zip(training["y"], training["base"], strict=True), training["hovertext"], strict=True))
    assert hover["replica 1", 0.0] == "round 0, replica 1<br>training 9.0 s<br>last to come: replica 1 (3.0 s)"
    assert sum("last to come: replica 0 (1 min 15 s)" in text for text in training["hovertext"]) == 2
    assert sum("last to come" in text for text in training["hovertext"]) == 14  # of two replicas in 7 of 8 rounds


def test_a_fixed_interval_is_a_dashed_line_in_rounds_and_in_megabytes() -> None:
    """8 rounds sent 16 kB; the 10 of a fixed interval would have sent 20."""
    values = run_json(name="a")
    charts = payload([run_from_json(values, source="a file")])["charts"]
    found = next(one for one in charts if one["id"] == "communication")
    for variant, end in zip(found["variants"], (10.0, 0.02), strict=True):
        (dashed,) = [line for line in variant["data"] if line["line"].get("dash") == "dash"]
        assert dashed["name"] == "fixed interval of 10" and dashed["x"] == [0, 100]
        assert dashed["y"] == [0.0, pytest.approx(end)]
    assert "dashed line" in found["note"]
    for one in values["rounds"]:  # where bytes aren't known there is none of them
        one["replicas"] = {}
    charts = payload([run_from_json({**values, "elements": None}, source="a file")])["charts"]
    assert [one["name"] for one in next(one for one in charts if one["id"] == "communication")["variants"]] == [
        "rounds"
    ]
    beside = payload([run_from_json(run_json(name, seed=1), source="a file") for name in ("autoloco", "fixed")])
    beside = next(one for one in beside["charts"] if one["id"] == "communication")
    drawn = [line for variant in beside["variants"] for line in variant["data"]]
    assert not any(line["line"].get("dash") for line in drawn)  # it is there itself
    assert "dashed" not in beside["note"]


def test_durations_say_what_they_count() -> None:
    measured, simulated = run_json(), run_json(source="simulation")
    for one in simulated["rounds"]:
        one["replicas"] = {}
    simulated["time"] = {"replicas": [{"train_seconds": 60.0}, {"train_seconds": 50.0, "down_seconds": 10.0}]}
    for values, words in ((measured, "Of 8 rounds, from the first step on"), (simulated, "As simulate worked it out")):
        charts = payload([run_from_json(values, source="a file")])["runs"][0]["charts"]
        assert next(one for one in charts if one["id"] == "shares")["note"].startswith(words)
    for source, words in (
        ("simulation", "Simulating it took"),
        ("a run", "From the launch to the last replica's end it"),
    ):
        page = payload([run_from_json({**simulated, "time": None, "source": source}, source="a file")])
        assert page["groups"][0]["facts"][2]["lines"][1].startswith(words)
