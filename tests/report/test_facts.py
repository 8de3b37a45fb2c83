"""The three facts, in figures worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from composer_replication.report.facts import facts_of
from composer_replication.report.groups import Group, group_runs
from composer_replication.report.measures import bytes_of, late, times_of
from composer_replication.report.runs import run_from_json
from tests.report.samples import run_json


def groups(*values: dict[str, Any]) -> list[Group]:
    return group_runs([run_from_json(one, source="a file") for one in values])[0]


def facts(*values: dict[str, Any], of: int = 0) -> list[dict[str, Any]]:
    found = groups(*values)
    return facts_of(found[of], found)


def test_what_was_saved() -> None:
    saved = facts(run_json())[0]
    assert (saved["answer"], saved["unit"]) == ("20 %", "fewer rounds")
    assert [bar["value"] for bar in saved["bars"]] == [8, 10]
    # 8 rounds of two replicas, 1000 bytes each. An int8 is a quarter of a float32, and a scale for each 4096.
    assert saved["lines"] == [
        "8 rounds; a fixed interval of 10 steps takes 10.",
        "16 kB sent by all replicas together, instead of 20 kB at the fixed interval.",
        "With the int8 codec too: 80 % fewer bytes than float32 at the fixed interval (79.9 kB).",
    ]


def test_at_what_loss() -> None:
    loss = facts(run_json(validation=2.5, last_loss=1.25))[1]
    assert (loss["answer"], loss["unit"]) == ("2.5000", "validation loss")
    assert loss["lines"] == ["Training loss of the last round 1.2500, of the first 4.7500."]


def test_where_time_was_lost() -> None:
    time = facts(run_json())[2]
    # A round: replica 0 trains 6 s, waits 3, exchanges 1 more; replica 1 trains 9 s and exchanges 1.
    assert {share["label"]: share["value"] for share in time["shares"]} == pytest.approx(
        {"training": 15 / 20, "waiting": 3 / 20, "exchange": 2 / 20}, abs=1e-12
    )
    assert (time["answer"], time["unit"]) == ("25 %", "of the replicas' time not spent training")
    assert time["lines"] == [
        "Time spent training, by replica: 0: 60 %, 1: 90 %.",
        "Most waited for: replica 1, the last in 8 of 8 rounds (24 s in all).",
    ]


def test_what_replicas_say_of_who_came_last_goes_before_what_their_times_say() -> None:
    values = run_json()
    values["rounds"][3]["replicas"]["1"] |= {"straggler": 0.0, "straggler_seconds": 7.5}
    run = run_from_json(values, source="a file")
    assert late(run.rounds[3]) == (0, 7.5) and late(run.rounds[4]) == (1, 3.0)
    times = times_of(run)
    assert times is not None and times.waited_for == {1: (7, 21.0), 0: (1, 7.5)}


def test_against_the_fixed_interval_seed_by_seed() -> None:
    adaptive = [run_json(seed=seed, validation=2.0 + 0.1 * seed) for seed in (1, 2, 3)]
    fixed = [run_json("fixed", seed=seed, validation=2.2 + 0.1 * seed - 0.05 * (seed == 3)) for seed in (1, 2, 3)]
    assert [(group.label, group.seeds) for group in groups(*fixed, *adaptive)] == [
        ("Fixed interval of 10", (1, 2, 3)),
        ("AutoLoCo", (1, 2, 3)),
    ]
    saved, loss, _ = facts(*fixed, *adaptive, of=1)
    assert saved["lines"][0] == "8 rounds; a fixed interval of 10 steps takes 10."
    assert (loss["answer"], loss["unit"]) == ("2.2000", "validation loss, ± 0.1000 over 3 runs")
    # Apart by 0.2, 0.2 and 0.15: 0.1833 on average, standard deviation 0.0289.
    assert "Validation loss 0.1833 ± 0.0289 lower than Fixed interval of 10, in 3 of 3 seeds." in loss["lines"]
    own = facts(*fixed, *adaptive)[0]
    assert (own["answer"], own["unit"]) == ("0 %", "saved in rounds")


def test_a_run_that_is_not_finished_says_what_it_has_of_losses() -> None:
    values = run_json(validation=None)
    values["rounds"] = values["rounds"][:5]
    loss = facts(values)[1]
    assert (loss["answer"], loss["unit"]) == ("2.5000", "training loss, last round")
    assert loss["lines"] == ["Training loss of the first round 4.5000.", "Validation comes at the end."]


def test_more_rounds_than_a_fixed_interval_are_called_so() -> None:
    saved = facts(run_json(intervals=(5,) * 20))[0]
    assert (saved["answer"], saved["unit"]) == ("100 %", "more rounds")


def test_what_was_not_recorded_is_said() -> None:
    values = run_json(validation=None, elements=None)
    for one in values["rounds"]:
        one["replicas"], one["loss"] = {}, None
    saved, loss, time = facts(values)
    assert saved["answer"] == "20 %" and saved["lines"][-1] == "Bytes were not recorded."
    assert loss["answer"] == "–" and loss["lines"] == ["No loss was recorded."]
    assert time["answer"] == "–" and "was not recorded" in time["lines"][0]


def test_bytes_of_rounds_that_have_not_told_yet_are_those_of_the_others() -> None:
    values = run_json()
    for told in values["rounds"][-1]["replicas"].values():
        del told["bytes_sent"], told["bytes_received"]
    found = bytes_of(run_from_json(values, source="a file"))
    assert found is not None and found.measured and (found.sent, found.received) == (16000.0, 32000.0)


def test_bytes_that_were_not_measured_follow_from_the_model_and_the_codec() -> None:
    values = run_json(codec="float32")
    for one in values["rounds"]:
        one["replicas"] = {}
    found = bytes_of(run_from_json(values, source="a file"))
    assert found is not None and not found.measured and found.sent == 4 * 1_000_000 * 2 * 8
    assert "worked out from the model's size" in facts(values)[0]["lines"][1]


def test_times_that_a_simulation_worked_out() -> None:
    part = {
        "train_seconds": 60.0,
        "exchange_seconds": 20.0,
        "wait_seconds": 10.0,
        "lost_seconds": 6.0,
        "down_seconds": 4.0,
    }
    values = run_json(time={"seconds": 100.0, "replicas": [part, {**part, "train_seconds": 80.0, "wait_seconds": 0.0}]})
    for one in values["rounds"]:
        one["replicas"] = {}
    time = facts(values)[2]
    assert [round(share["value"], 3) for share in time["shares"]] == [round(140 / 210, 3), round(30 / 210, 3), 0.19]
    assert time["lines"][1] == "Worked out for machines that were described to it, not measured."


def test_data_parallelism_exchanges_in_every_step() -> None:
    values = run_json(policy="ddp", base_horizon=10) | {"losses": [[50, 2.0], [100, 1.5]], "rounds": []}
    run = run_from_json(values, source="a file")
    assert run.exchanges == 100 and [one.loss for one in run.rounds] == [2.0, 1.5]
    saved = facts(values)[0]
    assert (saved["answer"], saved["unit"]) == ("900 %", "more rounds")


def test_a_run_without_rounds_has_facts_without_figures() -> None:
    assert [fact["answer"] for fact in facts(run_json(intervals=(10,)) | {"rounds": [], "result": None})] == ["–"] * 3


def test_a_hole_in_the_record_is_no_saving() -> None:
    whole = run_json()
    damaged = {**whole, "rounds": [one for one in whole["rounds"] if one["round"] != 1]}
    assert "%" in facts(whole)[0]["answer"]
    saved = facts(damaged)[0]
    assert (saved["answer"], saved["unit"]) == ("7", "rounds") and "rounds are missing" in saved["lines"][0]
