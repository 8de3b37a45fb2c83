"""Many kinds of runs on one page: none is pooled with another, and what they were trained on is looked at."""

from __future__ import annotations

from typing import Any

import pytest

from composer_replication.recipe import recipe_from
from composer_replication.report import payload, run_from_json
from composer_replication.report.groups import COLOURS
from composer_replication.simulation import SimulatedRun, record_of_simulation
from tests.report.samples import run_json

TASK = {"model": {"name": "byte_gpt"}, "data": {"name": "text_bytes"}, "optimizer": {"name": "adamw", "lr": 0.004}}


def page_of(*values: dict[str, Any]) -> dict[str, Any]:
    return payload([run_from_json(one, source=f"file {index}") for index, one in enumerate(values)])


def outer(**more: Any) -> dict[str, Any]:
    return {"kind": "nesterov", "lr": 0.7, "momentum": 0.7, "normalize": False, "adapt_lr": True, **more}


def loss_of(page: dict[str, Any], label: str) -> dict[str, Any]:
    return next(group for group in page["groups"] if group["label"] == label)["facts"][1]


def many() -> list[dict[str, Any]]:
    """Ten kinds over two seeds: the fixed interval, and nine of the adaptive policy whose losses are their own."""
    kinds = [run_json("fixed", seed=seed, validation=2.0, outer=outer()) for seed in (1, 2)]
    for index in range(9):
        own = {"name": f"kind {index}", "outer": outer(momentum=0.5 + 0.04 * index)}
        kinds += [run_json(seed=seed, validation=2.0 + 0.01 * index, **own) for seed in (1, 2)]
    return kinds


def test_more_kinds_than_colours_stay_kinds_of_their_own() -> None:
    page = page_of(*many())
    assert len(page["groups"]) == 10 > COLOURS
    assert [group["runs"] for group in page["groups"]] == [2] * 10
    labels = [row[0] for row in page["comparison"]["rows"]]
    assert labels[0] == "Fixed interval of 10" and len({*labels}) == 10
    assert {row[1] for row in page["comparison"]["rows"]} == {"1, 2"}
    assert len({run["label"] for run in page["runs"]}) == 20
    assert "those of one policy differ in outer.momentum" in page["notices"][0]
    # Each has the difference of its own runs, and is said to be of its own settings.
    for index in range(1, 9):
        loss = loss_of(page, labels[1 + index])
        own = next(bar for bar in loss["bars"] if bar["label"] == labels[1 + index])
        assert own["text"] == f"{2.0 + 0.01 * index:.4f} ± 0.0000"
        wanted = f"Validation loss {0.01 * index:.4f} ± 0.0000 higher than Fixed interval of 10, in 2 of 2 seeds."
        assert wanted in loss["lines"]
        told = [line for line in loss["lines"] if "outer momentum" in line]
        assert told == ([] if index == 5 else [told[0]]) and all(f" {0.5 + 0.04 * index:.2g}" in one for one in told)
        assert len(loss["bars"]) == 5 and "5 more in the table below" in loss["lines"][-1]


def test_more_kinds_than_colours_have_curves_without_bands_in_strokes_of_their_own() -> None:
    charts = page_of(*many())["charts"]
    for chart in charts:
        curves = [one for one in chart["variants"][0]["data"] if one.get("hovertemplate")]
        assert len({(one["line"]["color"], one["line"].get("dash")) for one in curves}) == len(curves) == 10
        assert not any("fill" in one for one in chart["variants"][0]["data"])
    loss = next(one for one in page_of(*many()[:4])["charts"] if one["id"] == "loss")
    assert any("fill" in one for one in loss["variants"][0]["data"])


def test_runs_of_two_names_and_the_same_seeds_are_two_kinds() -> None:
    other = [run_json(seed=seed, name="spike", last_loss=2.0) for seed in (1, 2)]
    page = page_of(*(run_json(seed=seed, name="main") for seed in (1, 2)), *other)
    assert [row[:2] for row in page["comparison"]["rows"]] == [
        ["AutoLoCo (main)", "1, 2"],
        ["AutoLoCo (spike)", "1, 2"],
    ]
    assert page["notices"] == [
        "AutoLoCo (main) and AutoLoCo (spike) have the same settings and seeds, and yet other rounds: something that "
        "isn't recorded differs (data, a disturbance, software)"
    ]
    apart = page_of(run_json(seed=1, name="one"), run_json(seed=2, name="two"))
    assert [row[:2] for row in apart["comparison"]["rows"]] == [["AutoLoCo", "1, 2"]]  # one seed each, in two folders


def test_nothing_is_taken_seed_by_seed_where_a_seed_occurs_twice() -> None:
    twice = [run_json(validation=2.0 + index, last_loss=1.0 + index) for index in range(2)]
    runs = [run_from_json(one, source="one file") for one in [*twice, run_json("fixed"), run_json("fixed", seed=2)]]
    page = payload(runs)
    assert page["notices"][0].startswith("AutoLoCo: seeds aren't known, or occur twice")
    lines = loss_of(page, "AutoLoCo")["lines"]
    assert "Validation loss 0.5000 higher than Fixed interval of 10 (2.0000)." in lines
    assert len({run["label"] for run in page["runs"][2:]}) == 2


def test_what_was_trained_on_is_compared() -> None:
    prose = {**TASK, "data": {"name": "prose"}}
    page = page_of(run_json(task=TASK), run_json("fixed", task=prose))
    assert page["notices"] == [
        "the runs weren't trained on the same: data.name text_bytes (AutoLoCo), prose (Fixed interval of 10): their "
        "losses can't be compared"
    ]
    assert ["task.data.name", "text_bytes", "prose"] in page["settings"][0]["rows"]
    assert loss_of(page, "AutoLoCo")["bars"] == []
    slower = {**TASK, "optimizer": {"name": "adamw", "lr": 0.001}}
    page = page_of(run_json(task=TASK), run_json("fixed", task=slower))
    assert page["notices"][0].endswith("some of the difference in their losses may be due to that")
    assert any("optimizer.lr 0.004, not 0.001" in line for line in loss_of(page, "AutoLoCo")["lines"])
    page = page_of(run_json(task=TASK), run_json("fixed"))
    assert page["notices"] == [
        "what the runs of Fixed interval of 10 were trained on isn't recorded: whether it is the same as in the others "
        "isn't known"
    ]
    assert page_of(run_json(task=TASK), run_json("fixed", task=TASK))["notices"] == []
    assert "trained on isn't recorded" in page_of(run_json(), run_json("fixed"))["comparison"]["note"]


def test_first_rounds_of_simulations_tell_that_they_were_not_trained_on_the_same() -> None:
    def simulated(policy: str, first: float) -> list[dict[str, Any]]:
        found = [run_json(policy, seed=seed, source="simulation") for seed in (1, 2)]
        for one in found:
            for told in one["rounds"][0]["replicas"].values():
                told["loss"] = first
        return found

    page = page_of(*simulated("fixed", 5.2), *simulated("autoloco", 5.3))
    assert page["notices"] == [
        "the same seed gave another loss in the first round, before anything was exchanged (Fixed interval of 10: "
        "5.2000; AutoLoCo: 5.3000): they weren't trained on the same data and model in the same way, so their losses "
        "aren't compared"
    ]
    assert not any("than Fixed" in line for line in loss_of(page, "AutoLoCo")["lines"])
    page = page_of(*simulated("fixed", 5.2), *simulated("autoloco", 5.2))
    assert page["notices"] == [] and any("than Fixed" in line for line in loss_of(page, "AutoLoCo")["lines"])


def test_a_simulation_says_what_it_trained() -> None:
    recipe = recipe_from("model: {name: byte_gpt}\ndata: {class: mine.Data}\n")
    run = SimulatedRun(
        replicas=2,
        seed=3,
        policy="autoloco",
        steps=10,
        rounds=(),
        validation_loss=1.0,
        digest="d",
        elements=5,
        disturbance="RateSpike",
    )
    task = record_of_simulation(recipe, run, name="x", seconds=1.0)["task"]
    assert task["model"] == {"name": "byte_gpt", "args": {}} and task["data"] == {"name": "mine.Data", "args": {}}
    assert task["optimizer"]["name"] == "adamw" and task["scheduler"]["name"] == "cosine"
    assert task["gradient_clip"] is None and task["disturbance"] == "RateSpike"


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_the_page_opens_on_the_adaptive_policy_with_its_defaults(order: tuple[int, ...]) -> None:
    runs = [run_json(outer=outer()), run_json(outer=outer(momentum=0.9)), run_json("fixed", outer=outer())]
    page = page_of(*(runs[index] for index in order))
    assert page["groups"][page["focus"]]["label"] == "AutoLoCo, momentum 0.7"
    assert page_of(run_json("fixed"), run_json("qsr"))["focus"] == 0


def test_a_setting_stands_in_one_place() -> None:
    runs = [run_json(base_horizon=10), run_json("fixed", base_horizon=10)]
    differs, same, _ = page_of(*runs)["settings"]
    names = [row[0] for row in (*differs["rows"], *same["rows"])]
    assert names.count("base_horizon") == 1 and not any(name.endswith("s.base_horizon") for name in names)
    assert differs["rows"][0] == ["policy.name", "autoloco", "fixed"]
