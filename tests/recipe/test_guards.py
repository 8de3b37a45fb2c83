"""Guards and signing on their way in: as options of an adapter, as keys of a recipe, on the command line."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from composer_replication.adapter.options import read_options
from composer_replication.autoloco.config import OuterConfig
from composer_replication.cli import main
from composer_replication.collective.in_process import InProcessFleet
from composer_replication.diloco.serverless.replica import adapter_options
from composer_replication.errors import RecipeError
from composer_replication.isolate import Identity
from composer_replication.recipe import recipe_from, to_yaml
from composer_replication.recipe.settings import guards_of
from composer_replication.store import LocalStore, SigningKey
from composer_replication.store.signing_key import SIGNING_KEY
from tests.collective.conformance import SCALAR, snapshot
from tests.collective.object_store.helpers import Fleet

SECRET = "a signing key for tests, of more than 32 bytes"
RECIPE = "model: {name: byte_gpt}\ndata: {name: text_bytes}\nfleet: {replicas: 4}\n"


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SIGNING_KEY, raising=False)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "signing.key"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    return path


def options(**given: Any):
    return read_options(interrupted=lambda: False, **{"base_horizon": 10, **given})


# -- an adapter's arguments


def test_options_reach_the_rounds(tmp_path: Path, key_file: Path) -> None:
    read = options(
        store=str(tmp_path / "store"),
        replica=0,
        replicas=4,
        outliers="clip",
        outlier_threshold=5.0,
        aggregation="trimmed_mean",
        trim_fraction=0.25,
        signing_key_file=str(key_file),
    )
    collective: Any = read.meet(0)
    guards = collective._policy.guards
    assert (guards.outliers, guards.outlier_threshold, guards.aggregation, guards.trim_fraction) == (
        "clip",
        5.0,
        "trimmed_mean",
        0.25,
    )
    assert collective._policy.min_replicas == 3
    assert SigningKey(SECRET.encode()).id in repr(collective._raw)
    assert SECRET not in repr(read) and SECRET not in repr(vars(collective))
    collective.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"outliers": "drop"}, "outliers must be one of"),
        ({"aggregation": "krum"}, "aggregation must be one of"),
        ({"aggregation": "median", "weighting": "tokens"}, "weighting='tokens' doesn't go with aggregation='median'"),
        ({"aggregation": "median", "replicas": 2}, "needs at least 3 replicas, got 2"),
        ({"aggregation": "median", "min_replicas": 2}, "min_replicas must be at least 3"),
        ({"signing_key_file": 7}, "signing_key_file must be the name of a file, got a int"),
        ({"signing_key_file": "nowhere.key"}, "signing_key_file nowhere.key can't be read"),
    ],
)
def test_options_that_cannot_work(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    place = {"store": str(tmp_path / "store"), "replica": 0, "replicas": 4, "replica_failure_policy": "skip"}
    with pytest.raises(ValueError, match=message):
        options(**{**place, **given})


@pytest.mark.parametrize(
    "given",
    [
        {"codec": "int8"},
        {"timeout": 5.0},
        {"start_timeout": 5.0},
        {"replica_failure_policy": "skip"},
        {"min_replicas": 1},
        {"deadline": "fixed"},
        {"checkpoint_every": 3},
        {"run": "one"},
        {"outliers": "clip"},
        {"aggregation": "median"},
        {"signing_key_file": "signing.key"},
        {"codec": "int8", "timeout": 5.0},
    ],
)
def test_what_a_ready_collective_would_not_hear_of(given: dict[str, Any]) -> None:
    collective = InProcessFleet(1).collectives()[0]
    with pytest.raises(ValueError, match=f"{', '.join(given)} can't be given together with collective="):
        options(collective=collective, **given)
    options(collective=collective, weighting="tokens", outer_lr=0.5)  # what isn't the collective's is fine


def test_an_outer_learning_rate_without_effect_is_refused() -> None:
    for refused in (lambda: OuterConfig(kind="average", lr=0.5), lambda: OuterConfig(lr=0.5).resolved("qsr")):
        with pytest.raises(ValueError, match="lr must be left out with .* not 0.5"):
            refused()
    for policy in ("qsr", "linear"):
        with pytest.raises(ValueError, match=f"lr must be left out with policy '{policy}'"):
            options(
                collective=InProcessFleet(1).collectives()[0],
                policy=policy,
                peak_lr=1.0 if policy == "qsr" else None,
                outer_lr=0.7,
            )
    assert (
        OuterConfig(kind="average").resolved("fixed").lr
        == OuterConfig(kind="average", lr=1.0).resolved("qsr").lr
        == 1.0
    )
    assert OuterConfig(kind="nesterov", lr=0.5).resolved("qsr").lr == 0.5
    assert OuterConfig().resolved("fixed").lr == OuterConfig().base_lr == 0.7


# -- recipes


def test_a_recipe_says_it_too(key_file: Path, tmp_path: Path) -> None:
    more = ["fleet.outliers=exclude", "fleet.aggregation=median", f"store.signing_key_file={key_file}"]
    recipe = recipe_from(RECIPE, more)
    assert recipe_from(to_yaml(recipe)) == recipe
    assert guards_of(recipe).outliers == "exclude" and guards_of(recipe).aggregation == "median"
    assert SECRET not in to_yaml(recipe)
    given = adapter_options(recipe, Identity(replica=0, replicas=4), tmp_path)
    read = options(**given | {"store": str(tmp_path / "store"), "base_horizon": None})
    collective: Any = read.meet(0)
    assert collective._policy.guards == guards_of(recipe) and "SignedStore" in repr(collective._raw)
    collective.close()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("fleet.outliers=drop", "fleet.outliers.*outliers must be one of 'warn', 'clip', 'exclude', 'off', got 'drop'"),
        ("fleet.trim_fraction=0.6", "fleet.trim_fraction"),
        ("fleet.outlier_threshold=0", "fleet.outlier_threshold"),
        ("store.signing_key_file=nowhere.key", "store.signing_key_file .*nowhere.key can't be read"),
        ("store.signing_key=abc", "store.signing_key .*section 'store' has no key .*signing_key_file"),
        ("autoloco={policy: qsr, outer_lr: 0.7}", "outer_lr must be left out with policy 'qsr'"),
    ],
)
def test_recipes_that_cannot_work(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe_from(RECIPE, [override])


def test_robust_means_that_a_recipe_cannot_have() -> None:
    for more in (["fleet.replicas=2"], ["autoloco.weighting=tokens"], ["fleet.min_replicas=2"]):
        with pytest.raises(RecipeError, match="fleet.aggregation.*median"):
            recipe_from(RECIPE, ["fleet.aggregation=median", *more])


def test_a_key_file_that_others_can_read_is_refused_before_anything_starts(key_file: Path, capsys) -> None:
    key_file.chmod(0o644)
    recipe = key_file.with_name("recipe.yaml")
    recipe.write_text(RECIPE)
    assert main(["launch", str(recipe), f"store.signing_key_file={key_file}"]) == 2
    said = capsys.readouterr().err
    assert "open to others than its owner (mode 644)" in said and f"chmod 600 {key_file}" in said and SECRET not in said
    assert not (Path("runs") / "run").exists()


# -- commands


@pytest.fixture
def signed_run(tmp_path: Path, key_file: Path) -> str:
    store = LocalStore(tmp_path / "store")
    with Fleet(2, store, signing_key=str(key_file)) as fleet:
        fleet.round(0, {0: 1.0, 1: 3.0}, leaving=True)
        for collective in fleet.all:
            collective.applied(partial(snapshot, SCALAR, 1))
            collective.finish("state-1", {})
    return str(store.root)


def test_commands_take_the_key(signed_run: str, key_file: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["status", signed_run, "--json", "--signing-key-file", str(key_file)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["round"] == 1 and told["ended"]
    assert main(["gc", signed_run, "--json", "--signing-key-file", str(key_file)]) == 0
    capsys.readouterr()
    monkeypatch.setenv(SIGNING_KEY, SECRET)
    assert main(["status", signed_run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == told


@pytest.mark.parametrize("command", ["status", "gc"])
def test_commands_without_the_key_say_so(command: str, signed_run: str, capsys) -> None:
    assert main([command, signed_run]) == 2
    said = capsys.readouterr().err
    assert "fleet.json is signed, and this process has no signing key" in said and "--signing-key-file" in said
