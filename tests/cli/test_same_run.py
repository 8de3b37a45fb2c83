"""`launch --resume` with another recipe than the run's own, or after its end: a sentence, and nothing is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_replication.cli import main
from composer_replication.cli.same_run import _facts, check_same_run
from composer_replication.collective.object_store.sealing import begin_epoch
from composer_replication.collective.object_store.wire import dump, load
from composer_replication.diloco.serverless.replica import FINAL
from composer_replication.errors import RecipeError
from composer_replication.recipe import Recipe, load_recipe
from composer_replication.store import LocalStore
from tests.collective.object_store.helpers import join
from tests.collective.object_store.test_epochs import killed
from tests.collective.object_store.toy import Toy, run_toy
from tests.support.threads import run_threads

RECIPE = """\
name: small
model: {name: byte_gpt, args: {width: 16, layers: 1, heads: 2, context: 16}}
data: {name: text_bytes, args: {context: 16, max_bytes: 50000, validation_bytes: 5000}}
training: {steps: 40}
autoloco: {base_horizon: 10}
codec: int8
"""


def made(folder: Path, *overrides: str) -> tuple[Recipe, LocalStore]:
    """A run's folder, and its store with a fleet in it that says of itself what the recipe's replicas would."""
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "summary.json").write_text("{}")
    for replica in range(2):
        (folder / f"replica-{replica}").mkdir()
        (folder / f"replica-{replica}" / FINAL).write_text("")
    return load_recipe(folder / "recipe.yaml", overrides), LocalStore(folder / "store")


def say_facts(store: LocalStore, recipe: Recipe) -> None:
    fleet = load(store.get("fleet.json"), "fleet.json")
    facts = {**fleet, **_facts(recipe)}
    facts["settings"] = {**facts["settings"], "frozen": {"a": "b"}}
    store.put("fleet.json", dump(facts))


@pytest.fixture
def stopped(tmp_path: Path) -> tuple[Recipe, LocalStore, Path]:
    """A run of two replicas that was killed in round 4."""
    recipe, store = made(tmp_path)
    (tmp_path / "records").mkdir()
    killed(store, tmp_path / "records", 2, 4)  # type: ignore[arg-type]
    say_facts(store, recipe)
    return recipe, store, tmp_path


@pytest.fixture
def ended(tmp_path: Path) -> tuple[Recipe, LocalStore, Path]:
    recipe, store = made(tmp_path)
    run_threads([lambda r=r: run_toy(Toy.fresh(r), join(store, r, 2), 3) for r in range(2)])
    say_facts(store, recipe)
    return recipe, store, tmp_path


def contents(folder: Path) -> dict[Path, bytes]:
    """But for the launcher's lock, which holds nothing."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}


REFUSED = [
    (["codec=float32"], ["codec: 'float32' here, 'int8' there"]),
    (["autoloco.base_horizon=20"], ["autoloco.base_horizon: 20 here, 10 there"]),
    (["autoloco.outer_momentum=0.8"], ["autoloco.outer_momentum: 0.8 here, 0.7 there"]),
    (["fleet.outliers=clip", "fleet.failure_policy=skip"], ["fleet.outliers: 'clip'", "fleet.failure_policy"]),
    (["fleet.shared_checkpoint_every_rounds=3"], ["fleet.shared_checkpoint_every_rounds: 3 here"]),
    (["model.args.width=32"], ["model: not the one"]),
    (["autoloco.policy=fixed", "fleet.replicas=3"], ["autoloco.policy: 'fixed' here, 'autoloco' there"]),
    (["training.steps=2"], ["training.steps=2: the run has done", "steps already"]),
]


def test_other_settings_are_refused_before_anything_is_written(stopped, capsys) -> None:
    pytest.importorskip("lightning")
    _, _, folder = stopped
    before = contents(folder)
    for overrides, words in REFUSED:
        assert main(["launch", str(folder / "recipe.yaml"), "--resume", f"output={folder}", *overrides]) == 2
        error = capsys.readouterr().err
        assert all(word in error for word in words), error
        assert f"composer-replication launch {folder / 'recipe.yaml'} --resume" in error and error.count("\n") == 1
        assert contents(folder) == before


def test_the_same_run_passes_and_a_new_epoch_may_change_its_membership(stopped) -> None:
    recipe, store, folder = stopped
    file = folder / "recipe.yaml"
    assert check_same_run(recipe, store, file, new_epoch=False) == ""
    more = load_recipe(file, ["fleet.replicas=3", "fleet.failure_policy=skip", "codec=float32", "training.steps=80"])
    assert check_same_run(more, store, file, new_epoch=True) == ""
    begin_epoch(store, 3)  # has no fleet.json yet
    assert check_same_run(more, store, file, new_epoch=False) == ""
    with pytest.raises(RecipeError, match="autoloco.base_horizon"):
        check_same_run(load_recipe(file, ["autoloco.base_horizon=20"]), store, file, new_epoch=False)


def test_a_run_that_has_ended_is_left_as_it_is(ended, capsys) -> None:
    pytest.importorskip("lightning")
    _, _, folder = ended
    before = contents(folder)
    command = ["launch", str(folder / "recipe.yaml"), "--resume", f"output={folder}"]
    assert main(command) == 0
    assert "the run has ended (3 rounds, " in capsys.readouterr().out
    for override, words in (("fleet.replicas=3", "with 2 replicas"), ("training.steps=80", "can't be trained on")):
        assert main([*command, override]) == 2
        assert words in capsys.readouterr().err
    assert contents(folder) == before


def test_a_replica_that_has_not_written_its_weights_is_started_again(ended) -> None:
    recipe, store, folder = ended
    (folder / "replica-1" / FINAL).unlink()
    assert check_same_run(recipe, store, folder / "recipe.yaml", new_epoch=False) == ""
