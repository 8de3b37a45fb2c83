"""`simulate`'s times: options, words and JSON; nothing is trained for `--time-only`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from composer_replication.cli import main

RECIPE = str(Path(__file__).parents[2] / "recipes" / "quickstart.yaml")
TIMED = ["simulate", RECIPE, "--time-only", "--step-seconds", "1"]


def told(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert main([*TIMED, *more]) == 0
    return capsys.readouterr().out


def values(capsys: pytest.CaptureFixture[str], *more: str) -> dict:
    return json.loads(told(capsys, *more, "--json"))


def test_intervals_are_the_schedule_s(capsys: pytest.CaptureFixture[str]) -> None:
    one = values(capsys)
    assert sum(one["intervals"]) == 1200 and one["time"]["rounds"] == len(one["intervals"])
    assert main(["plan", RECIPE, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"]["least"] == len(one["intervals"])
    assert one["time"]["fixed"]["rounds"] == 60 > one["time"]["rounds"]
    assert one["time"]["seconds"] < one["time"]["fixed"]["seconds"] < one["time"]["every_step"]["seconds"] * 1.1


def test_a_large_run_of_a_model_of_one_s_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        "name: own\nmodel: {class: nowhere.to.be.Found}\ndata: {class: nowhere.to.be.Data}\n"
        "training: {steps: 50000}\nautoloco: {base_horizon: 500, warmup_steps: 2500}\n"
        "scheduler: {warmup_steps: 2500}\nfleet: {replicas: 8}\n"
    )
    command = ["simulate", str(path), "--time-only", "--step-seconds", "1", "--bandwidth", "100"]
    assert main(command) == 2
    assert "--parameters 1.3B" in capsys.readouterr().err
    assert main([*command, "--parameters", "215M"]) == 0
    out = capsys.readouterr().out
    assert "taken for the learning rate: the recipe's scheduler" in out and "215M parameters" in out
    assert "with a fixed interval of 500" in out and "DDP): at least" in out


def test_failures_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    strict = told(capsys, "--fail", "2@5m+45", "--jitter", "0.05")
    assert "intervals trained in vain: 1; rounds in which somebody was absent: 0" in strict
    row = next(line.split() for line in strict.splitlines() if line.startswith("       2  "))
    assert row[-5:-2] == ["s", "45", "s"]
    skip = values(capsys, "fleet.failure_policy=skip", "--fail", "2@5m+inf")["time"]
    assert skip["replicas"][2]["rounds_absent"] == skip["short_rounds"] > 10
    gone = told(capsys, "--fail", "2@5m+inf")
    assert "is given up: replica 2 missed for more than 120 s, and strict needs everybody" in gone
    assert "fleet.failure_policy=skip goes on without it" in gone


def test_each_way_of_failing_reaches_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    still = values(capsys)["time"]["seconds"]
    for option in (
        ["--preempt", "1@100+30"],
        ["--link-down", "1@0+60"],
        ["--link", "1=0.5"],
        ["--failures-per-hour", "6", "--restart-seconds", "20"],
        ["--preemptions-per-hour", "6", "--restart-seconds", "20"],
        ["--startup-seconds", "30"],
        ["--jitter", "0.3"],
    ):
        assert values(capsys, *option)["time"]["seconds"] > still + 1, option
    first, other = (values(capsys, "--jitter", "0.3", "--time-seed", seed)["time"]["seconds"] for seed in "12")
    assert first != other


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--time-only"], "--time-only needs --step-seconds"),
        (["--fail", "1@2"], "--fail needs --step-seconds"),
        (["--step-seconds", "1", "--parameters", "1B"], "--parameters is for --time-only"),
        (["--time-only", "--step-seconds", "1", "--seeds", "1"], "--time-only trains nothing"),
        (["--time-only", "--step-seconds", "1", "--fail", "2"], "--fail 2: write it like 2@600+120"),
        (["--time-only", "--step-seconds", "1", "--fail", "9@2"], "there is no replica 9 in a fleet of 4"),
        (["--time-only", "--step-seconds", "1", "--link-down", "1@2"], "for how long?"),
        (["--time-only", "--step-seconds", "1", "--link", "1=x"], "replica 3's link carries 25 Mbit/s"),
        (["--time-only", "--step-seconds", "1", "--link", "1=0"], "replica 1's up must be more than 0"),
        (["--time-only", "--step-seconds", "1", "--jitter", "-1"], "jitter must be 0 or more"),
        (["--time-only", "--step-seconds", "1", "--restart-seconds", "0"], "restart_seconds must be more than 0"),
        (["--time-only", "--step-seconds", "1", "--fail", "1@2+0"], "replica 1 can't be gone for 0.0 s"),
        (["--time-only", "--step-seconds", "60", "--failures-per-hour", "60"], "never gets through an interval of 20"),
    ],
)
def test_what_cannot_be_is_one_sentence(more: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", RECIPE, *more]) == 2
    assert words in capsys.readouterr().err
