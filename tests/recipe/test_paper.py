"""The paper's recipes: their rounds, what they cost, and what they set, from the files themselves."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from composer_replication.cli import main
from composer_replication.cli.schedule_options import OVERRIDES
from composer_replication.recipe import load_recipe, outer_config

RECIPES = Path(__file__).parents[2] / "recipes"
ROUNDS = {
    "c4-215m/autoloco": 73,
    "c4-215m/diloco": 100,
    "c4-215m/qsr": 41,
    "c4-215m/linear": 100,
    "c4-215m/ddp": 10,  # which exchange nothing
    "ablation/diloco-0.7": 100,
    "ablation/intervals": 73,
    "ablation/momentum": 73,
    "ablation/step": 73,
    "ablation/normalised": 73,
    "ultrachat-8b/autoloco": 49,
    "ultrachat-8b/diloco": 65,
    "ultrachat-8b/ddp": 7,
    "ultrachat-8b/autoloco-16": 49,
    "ultrachat-8b/diloco-16": 65,
    "ultrachat-8b/autoloco-16-int8": 49,
    "ultrachat-8b/diloco-16-int8": 65,
}
SIZE = ("--parameters", "8030261248")


def path(name: str) -> str:
    return str(RECIPES / f"{name}.yaml")


def shown(capsys: Any, *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def schedule(capsys: Any, name: str, *more: str) -> dict[str, Any]:
    return json.loads(shown(capsys, "schedule", path(name), "--json", *SIZE, *more))


def test_every_file_is_looked_at() -> None:
    files = {f"{one.parent.name}/{one.stem}" for one in RECIPES.glob("*/*.yaml")}
    assert files == set(ROUNDS)
    for name in files:
        text = Path(path(name)).read_text()
        assert load_recipe(path(name)).name.startswith(name.split("/")[0]) and "(ours)" in text and "(paper)" in text


@pytest.mark.parametrize("name", ROUNDS)
def test_the_rounds_of_the_whole_budget(capsys: Any, name: str) -> None:
    found = schedule(capsys, name)
    assert found["rounds"] == len(found["horizons"]) == ROUNDS[name]
    assert sum(found["horizons"]) == found["steps"] == (6490 if "chat" in name else 50_000)


def test_the_published_intervals(capsys: Any) -> None:
    c4 = schedule(capsys, "c4-215m/autoloco")["horizons"]
    assert c4 == [500] * 7 + [550] * 5 + [600] * 5 + [650] * 5 + [700] * 5 + [750] * 45 + [250]
    assert schedule(capsys, "c4-215m/linear")["horizons"] == [*range(10, 1000, 10), 500]
    assert statistics.median(schedule(capsys, "c4-215m/qsr")["horizons"]) == 603


def test_what_is_saved_is_what_the_paper_says(capsys: Any) -> None:
    """In bytes, by the same arithmetic as a launch."""

    def sent(name: str) -> float:
        return schedule(capsys, name)["total"]["up_bytes"]

    assert sent("c4-215m/autoloco") / sent("c4-215m/diloco") == pytest.approx(0.73)
    assert sent("ultrachat-8b/autoloco") / sent("ultrachat-8b/diloco") == pytest.approx(49 / 65)
    whole = sent("ultrachat-8b/autoloco-16-int8") / sent("ultrachat-8b/diloco-16")
    # int8 has four bytes of scale for each 4,096 elements, and the store's objects have heads.
    assert 1 - whole == pytest.approx(0.623, abs=0.001)


def test_hours_on_a_given_link(capsys: Any) -> None:
    one, half = (schedule(capsys, "ultrachat-8b/autoloco", "--bandwidth", mbit) for mbit in ("2000", "1000"))
    assert one["round"]["up_bytes"] == half["round"]["up_bytes"]
    requests = one["round"]["requests"] / 8 * 0.05 + 8 * 0.05  # which take as long on any link
    assert half["round"]["seconds"] - requests == pytest.approx(2 * (one["round"]["seconds"] - requests), rel=0.01)
    assert half["total"]["seconds"] == pytest.approx(49 * half["round"]["seconds"])
    timed = schedule(capsys, "ultrachat-8b/autoloco", "--step-seconds", "2.5")
    assert timed["training_seconds"] == 6490 * 2.5
    text = shown(capsys, "schedule", path("ultrachat-8b/autoloco"), *SIZE, "--step-seconds", "2.5", "codec=int8")
    for words in (
        "inner step    adamw, lr 1e-05, weight decay 0, betas [0.9, 0.95]",
        "its lr        cosine: 200 steps of warm-up, then to 0 of the peak at step 6490",
        "outer step    nesterov, lr 0.7, momentum 0.7; adapted to the interval: momentum in [0.5, 0.95], lr at most",
        "pseudo-gradients divided by rho",
        "horizons      100, later 50 to 150 in steps of 10; 200 steps of warm-up",
        "49 rounds if every interval goes well; a fixed interval of 100 takes 65 (75 %)",
        "100×7, 110×5, 120×5, 130×5, 150×26, 90×1",
        "(8.03G parameters, int8)",
        " 2 h 07 min of exchanging",
        "with training",
    ):
        assert words in text


def test_what_a_recipe_says_has_a_setting_to_put_over_it(capsys: Any) -> None:
    usual = {"base": 500, "warmup": 9, "policy": "autoloco", "decay": "linear", "growth_cap": 1.2, "alpha": 2.0}
    values = {"steps": 9000, "final_fraction": 0.1, "peak_lr": 0.1, "min": 400, "max": 900, "step": 50, "increment": 5}
    both = {**usual, **values}
    assert both.keys() == OVERRIDES.keys()
    words = [f"{OVERRIDES[name]}={value}" for name, value in both.items() if name not in ("alpha", "increment")]
    found = json.loads(shown(capsys, "schedule", path("c4-215m/autoloco"), *SIZE, "--json", *words))
    assert sum(found["horizons"]) == 9000 and found["scheduler"]["final_fraction"] == 0.1
    for name, policy in (("alpha", "qsr"), ("increment", "linear")):
        words = [f"autoloco.policy={policy}", f"{OVERRIDES[name]}={both[name]}"]
        more = json.loads(shown(capsys, "schedule", path(f"c4-215m/{policy}"), *SIZE, "--json", *words))
        assert more["policy"] == policy


@pytest.mark.parametrize("name", ["c4-215m/autoloco", "ultrachat-8b/autoloco-16-int8"])
def test_a_dry_run_needs_neither_data_nor_model_nor_gpu(
    capsys: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lightning")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = shown(capsys, "launch", path(name), "--dry-run")
    assert f"{ROUNDS[name]} rounds at least" in text and "Nothing was started." in text
    text = shown(capsys, "plan", path(name), *SIZE)
    assert f"rounds        {ROUNDS[name]} at least" in text and "8.03G parameters" in text


def test_the_size_of_the_c4_model_is_told_by_its_shapes(capsys: Any) -> None:
    pytest.importorskip("transformers")
    found = json.loads(shown(capsys, "schedule", path("c4-215m/diloco"), "--json"))
    assert found["round"]["parameters"] == 214_983_680


def test_the_workers_share_one_batch() -> None:
    for name in ROUNDS:
        recipe = load_recipe(path(name))
        workers = recipe.fleet.replicas * recipe.training.devices
        batch = workers * recipe.data.args["batch_size"] * recipe.training.accumulate
        assert batch == (32 if "chat" in name else 512 if "ablation" in name else 1024)


def test_the_ablation_s_variants_differ_in_what_they_are_for() -> None:
    found = {}
    for name in ("intervals", "momentum", "step", "normalised", "diloco-0.7"):
        recipe = load_recipe(path(f"ablation/{name}"))
        outer = outer_config(recipe)
        adapts = (outer.adapt_momentum, outer.adapt_lr, outer.normalize)
        found[name] = (recipe.autoloco.policy, outer.momentum, adapts)
        assert (recipe.fleet.replicas, recipe.training.seed) == (4, 42)
    assert found["intervals"] == ("autoloco", 0.7, (False, False, False))
    assert found["momentum"] == ("autoloco", 0.7, (True, False, False))
    assert found["step"] == ("autoloco", 0.7, (True, True, False))
    assert found["normalised"] == ("autoloco", 0.7, (True, True, True))
    assert found["diloco-0.7"][:2] == ("fixed", 0.7)
    assert outer_config(load_recipe(path("c4-215m/diloco"))).momentum == 0.9
    assert outer_config(load_recipe(path("c4-215m/qsr"))).kind == "average"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give a recipe, or --steps and --base"),
        (["--steps", "100", "--base", "10", "--bandwidth", "5"], "--bandwidth needs a recipe"),
        ([path("c4-215m/qsr"), "--alpha", "2"], "--alpha: a recipe says that itself. To put something else over it:"),
        ([path("c4-215m/qsr"), "--steps", "9", "--warmup", "0"], " training.steps=9 scheduler.warmup_steps=0"),
        ([path("c4-215m/qsr"), "--decay", "linear"], " scheduler.name=linear"),
        ([path("c4-215m/qsr"), "--bandwidth", "0"], "--bandwidth must be a positive number"),
        ([path("c4-215m/qsr"), "autoloco.polcy=fixed"], "Did you mean 'policy'?"),
        ([path("c4-215m/qsr"), "model.class=my.Model", "model.name=null"], "may have a schedule of its own"),
    ],
)
def test_a_wrong_use_is_one_sentence(capsys: Any, arguments: list[str], words: str) -> None:
    assert main(["schedule", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
