"""`simulate`: what it prints and keeps, and that nothing is trained twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from composer_replication.cli import main

RECIPE = str(Path(__file__).parents[2] / "recipes" / "quickstart.yaml")
SMALL = [
    "fleet.replicas=2",
    "training.steps=12",
    "scheduler.warmup_steps=2",
    "autoloco.base_horizon=4",
    "model.args.width=32",
    "data.args.max_bytes=60000",
    "data.args.validation_bytes=2000",
]


def test_runs_are_kept_and_not_trained_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "runs" / "small.jsonl"
    command = ["simulate", RECIPE, *SMALL, "-o", str(kept), "--step-seconds", "0.5", "--slower", "1=2"]
    assert main([*command, "--seeds", "1"]) == 0
    first = capsys.readouterr().out
    assert "seed 1: round 0, step 4 of 12" in first and "step 12 of 12" in first
    assert main([*command, "--seeds", "1", "2"]) == 0
    second = capsys.readouterr().out
    assert f"seed 1: in {kept} already" in second and "over 2 seeds" in second
    runs = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [run["seed"] for run in runs] == [1, 2]
    assert [one["steps"] for one in runs[0]["rounds"]] == [4, 4, 4]
    # Replica 0 trains half of the time that replica 1 takes, and waits for the rest.
    assert "on these machines 13 s" in second  # and half a second for each exchange
    rows = [line.split() for line in second.splitlines() if line.startswith(("       0  ", "       1  "))]
    assert rows[0][:3] == ["0", "6.0", "s"] and rows[1][:3] == ["1", "12", "s"]
    assert rows[0][7:9] == ["6.0", "s"] and rows[1][7:9] == ["0.0", "s"]  # what they wait


def test_each_seed_s_run_that_ends_early_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", RECIPE, *SMALL, "training.steps=4", "--seeds", "1", "2", "--step-seconds", "1"]
    assert main([*command, "--fail", "1@2+1h"]) == 1
    out = capsys.readouterr().out
    assert "and then the run ends: round 0 is given up: replica 1 missed for more than 900 s, and the first" in out
    assert "seed 2: round 0 is given up: replica 1 missed" in out


def test_another_recipe_is_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "runs.jsonl"
    for codec in ("int8", "float32"):
        assert main(["simulate", RECIPE, *SMALL, f"codec={codec}", "-o", str(kept), "--json"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(kept.read_text().splitlines()) == 2 and printed[0]["result"]["digest"] != printed[1]["result"]["digest"]
    assert printed[0]["result"]["bytes_sent"] < printed[1]["result"]["bytes_sent"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--replicas", "0"], "--replicas must be at least 1"),
        (["--slower", "1=2"], "--slower needs --step-seconds"),
        (["--step-seconds", "1", "--slower", "one"], "write it like 3=1.5"),
        (["--step-seconds", "1", "--slower", "2=2"], "there is no replica 2 in a fleet of 2"),
        (["--step-seconds", "0"], "--step-seconds 0: it must be from 1e-06"),
        (["training.precision=bf16-mixed"], "simulate trains in 32-true"),
        (["--step-seconds", "1", "--latency", "-1"], "--latency -1: it must be from 0"),
    ],
)
def test_what_cannot_be_is_one_sentence(more: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", RECIPE, *SMALL, *more]) == 2
    assert words in capsys.readouterr().err


def test_a_file_of_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("not a run\n")
    assert main(["simulate", RECIPE, *SMALL, "-o", str(other)]) == 2
    assert "line 1, isn't JSON" in capsys.readouterr().err and other.read_text() == "not a run\n"
