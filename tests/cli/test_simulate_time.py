"""`simulate`'s times: options, words and JSON; nothing is trained for `--time-only`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from composer_replication.cli import main

RECIPE = str(Path(__file__).parents[2] / "recipes" / "quickstart.yaml")
TIMED = ["simulate", RECIPE, "--time-only", "--step-seconds", "1"]


def told(capsys: pytest.CaptureFixture[str], *more: str, code: int = 0) -> str:
    assert main([*TIMED, *more]) == code
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


def test_a_run_that_ends_early_is_exit_code_1_and_what_ended_it(capsys: pytest.CaptureFixture[str]) -> None:
    gone = told(capsys, "--fail", "2@5m+inf", code=1)
    assert "is given up: replica 2 missed for more than 120 s (gone for good), and strict needs everybody" in gone
    assert "What would help: fleet.failure_policy=skip goes on without." in gone  # no timeout would
    late = told(capsys, "--fail", "2@5m+10m", code=1)
    assert "missed for more than 120 s, and" in late
    assert "What would help: a longer fleet.timeout_seconds waits; fleet.failure_policy=skip goes on without." in late
    assert "the first round needs everybody" in told(capsys, "--fail", "2@5+1h", "fleet.failure_policy=skip", code=1)
    everybody = [word for replica in "0123" for word in ("--fail", f"{replica}@10+inf")]
    nobody = told(capsys, *everybody, code=1)
    assert "round 0 never closes: all replicas are gone for good." in nobody and "What would help" not in nobody
    as_json = json.loads(told(capsys, "--fail", "2@5m+inf", "--json", code=1))["time"]
    assert as_json["aborted"] and as_json["remedy"]


def test_a_failure_without_a_time_lasts_restart_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--fail", "--preempt"):
        gone = values(capsys, option, "2@5m", "--restart-seconds", "37", option, "3@5m+21")["time"]["replicas"]
        assert [one["down_seconds"] for one in gone] == pytest.approx([0.0, 0.0, 37.0, 21.0])


def test_gradients_take_two_bytes_where_training_is_in_two(capsys: pytest.CaptureFixture[str]) -> None:
    each = {
        precision: values(capsys, f"training.precision={precision}", "--parameters", "1M")["time"]["every_step"]
        for precision in ("32-true", "bf16-true", "16-true", "bf16-mixed")
    }
    sizes = {precision: one["bytes_a_step"] for precision, one in each.items()}
    full = 2 * 3 / 4 * 4e6  # a ring of four sends 2 (N - 1)/N of them; mixed precision keeps gradients in float32
    assert sizes == {"32-true": full, "bf16-true": full / 2, "16-true": full / 2, "bf16-mixed": full}
    whole, half = (each[name]["all_reduce_seconds"] - 6 * 0.001 for name in ("32-true", "bf16-true"))
    assert whole == pytest.approx(2 * half)


@pytest.mark.parametrize(
    ("option", "value", "range_"),
    [
        ("--link", "1=1e-320", "from 0.001 to 1e+09 Mbit/s"),
        ("--bandwidth", "inf", "from 0.001 to 1e+09 Mbit/s"),
        ("--bandwidth", "nan", "from 0.001 to 1e+09 Mbit/s"),
        ("--jitter", "1e9", "from 0 to 3 of a step's time"),
        ("--jitter", "1e200", "from 0 to 3 of a step's time"),
        ("--slower", "1=1e300", "from 0.001 to 1000 times as long"),
        ("--slower", "1=nan", "from 0.001 to 1000 times as long"),
        ("--step-seconds", "1e300", "from 1e-06 to 1e+06 seconds"),
        ("--latency", "-1", "from 0 to 1e+06 milliseconds"),
        ("--peer-latency", "1e300", "from 0 to 1e+06 milliseconds"),
        ("--restart-seconds", "1e300", "from 0.001 to 1e+07 seconds"),
        ("--startup-seconds", "1e300", "from 0 to 1e+07 seconds"),
        ("--failures-per-hour", "1e9", "from 0 to 3600 an hour"),
        ("--fail", "1@1e300", "write it like 2@600+120"),
        ("--link-down", "1@5+1e300", "write it like 2@600+120"),
    ],
)
def test_numbers_out_of_all_proportion(
    option: str, value: str, range_: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TIMED, f"{option}={value}"]) == 2
    said = capsys.readouterr().err
    assert f"{option} {float(value):g}: it" in said if "@" not in value and "=" not in value else f"{option} " in said
    assert range_ in said


def test_machines_at_the_ends_of_what_is_allowed_have_times(capsys: pytest.CaptureFixture[str]) -> None:
    slow = ["--step-seconds=1e6", "--link=1=0.001", "--slower=1=1000", "--latency=1e6", "--jitter=3"]
    rare = ["--failures-per-hour=1e-320", "--fail=1@1e-320+1e-320"]
    for options in (slow, rare, ["--step-seconds=1e-6", "--bandwidth=1e9", "--latency=0"]):
        assert main([*TIMED, *options, "fleet.timeout_seconds=1e9", "fleet.start_timeout_seconds=1e12"]) in (0, 1)
        assert "inf" not in capsys.readouterr().out


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
        (["--time-only", "--step-seconds", "1", "--link", "1=0"], "--link 1=0: it must be from 0.001"),
        (["--time-only", "--step-seconds", "1", "--jitter", "-1"], "--jitter -1: it must be from 0"),
        (["--time-only", "--step-seconds", "1", "--restart-seconds", "0"], "--restart-seconds 0: it must be"),
        (["--time-only", "--step-seconds", "1", "--fail", "1@2+0"], "replica 1 can't be gone for 0.0 s"),
        (["--time-only", "--step-seconds", "60", "--failures-per-hour", "60"], "never gets through an interval of 20"),
    ],
)
def test_what_cannot_be_is_one_sentence(more: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", RECIPE, *more]) == 2
    assert words in capsys.readouterr().err
