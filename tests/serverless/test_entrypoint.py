"""The command that every executor starts: who it takes itself for, what it refuses, how it ends."""

from __future__ import annotations

import os

import pytest

from composer_replication import errors, isolate
from composer_replication.diloco.serverless import LocalProcessExecutor, ReplicaSpec
from composer_replication.diloco.serverless.exit_codes import Exit
from composer_replication.diloco.serverless.replica_entrypoint import _parser, _settings, exit_code, main
from composer_replication.diloco.serverless.spec import entrypoint_arguments, entrypoint_command

RECIPE = """\
name: small
model: {name: byte_gpt, args: {width: 16, layers: 1, heads: 2, context: 16}}
data: {name: text_bytes}
fleet: {replicas: 3}
output: elsewhere
"""


@pytest.fixture
def recipe(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text(RECIPE)
    return f"--recipe={file}"


@pytest.fixture(autouse=True)
def _no_identity_in_the_environment():
    """None before, and none that a test's isolation leaves behind."""
    before = dict(os.environ)
    for name in (isolate.REPLICA, isolate.REPLICAS, isolate.STORE, isolate.LAUNCHER):
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(before)


def settings(*arguments: str):
    return _settings(_parser().parse_args(arguments))


def test_identity_and_store_come_from_the_arguments(recipe):
    identity, uri, loaded, folder = settings(
        recipe, "--replica-id=2", "--num-replicas=3", "--rendezvous-uri=file:///s", "training.steps=7"
    )
    assert (identity.replica, identity.replicas, uri, loaded.training.steps) == (2, 3, "file:///s", 7)
    assert folder.parts[-2:] == ("elsewhere", "replica-2")


def test_or_from_the_environment_so_that_one_command_serves_every_container(recipe, monkeypatch):
    monkeypatch.setenv(isolate.REPLICA, "1")
    monkeypatch.setenv(isolate.REPLICAS, "3")
    monkeypatch.setenv(isolate.STORE, "file:///s")
    identity, uri, _, _ = settings(recipe)
    assert (identity.replica, identity.replicas, uri) == (1, 3, "file:///s")
    monkeypatch.delenv(isolate.REPLICAS)
    assert settings(recipe)[0].replicas == 3  # the recipe's


def test_one_launch_of_composer_s_is_a_whole_fleet(recipe, monkeypatch):
    world = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3", "NODE_RANK": "0"}
    for name, value in {**world, "MASTER_ADDR": "h", "MASTER_PORT": "29500", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)
    given = (recipe, "--launcher=composer", "--rendezvous-uri=file:///s")
    identity, *_ = settings(*given, "trainer=composer")
    assert (identity.replica, identity.replicas) == (2, 3)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")  # what Composer is going to see
    for name, value in {**world, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    for name in (isolate.REPLICA, isolate.REPLICAS):
        monkeypatch.delenv(name)
    with pytest.raises(ValueError, match="fleet of 3 .*told of 4: add fleet.replicas=4"):
        settings(*given, "trainer=composer")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--replica-id=0", "--num-replicas=4", "--rendezvous-uri=file:///s"], "fleet.replicas=4"),
        (["--replica-id=3", "--num-replicas=3", "--rendezvous-uri=file:///s"], "between 0 and 2"),
        (["--num-replicas=3", "--rendezvous-uri=file:///s"], "replica"),
        (["--replica-id=0"], "--rendezvous-uri"),
        (["--replica-id=0", "--rendezvous-uri=file:///s", "training.stepz=1"], "'steps'"),
    ],
)
def test_what_does_not_fit_is_one_sentence_and_exit_code_3(recipe, capsys, arguments, words):
    assert main([recipe, *arguments]) == Exit.SETTINGS
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_spec_by_hand_becomes_a_recipe_with_the_fixed_interval():
    spec = ReplicaSpec(
        1, 4, "file:///s", "byte_gpt", {"name": "AdamW", "lr": 4e-4, "betas": [0.9, 0.95]}, 250, 0.6, 0.8, 7
    )
    identity, uri, recipe, _ = settings(*entrypoint_arguments(spec))
    assert (identity.replica, identity.replicas, uri) == (1, 4, "file:///s")
    assert (recipe.autoloco.policy, recipe.autoloco.base_horizon, recipe.training.steps) == ("fixed", 250, 1750)
    assert (recipe.autoloco.outer_lr, recipe.autoloco.outer_momentum) == (0.6, 0.8)
    assert (recipe.optimizer.name, recipe.optimizer.lr, recipe.optimizer.args) == (
        "AdamW",
        4e-4,
        {"betas": [0.9, 0.95]},
    )
    own = ReplicaSpec(0, 1, "file:///s", "my_package.Model", trainer="composer")
    assert settings(*entrypoint_arguments(own))[2].model.class_ == "my_package.Model"
    assert (recipe.trainer, settings(*entrypoint_arguments(own))[2].trainer) == ("lightning", "composer")
    assert entrypoint_command(own, "python")[:6] == ["python", "-m", "composer.cli", "-n", "1", "-m"]
    with pytest.raises(ValueError, match="trainer must be 'lightning' or 'composer', got 'keras'"):
        ReplicaSpec(0, 1, "file:///s", trainer="keras")


@pytest.mark.parametrize("optimizer", ["{", "[1]"])
def test_an_optimizer_that_is_no_json_object(capsys, optimizer):
    arguments = ["--replica-id=0", "--num-replicas=1", "--rendezvous-uri=file:///s", f"--inner-optimizer={optimizer}"]
    assert main(arguments) == Exit.SETTINGS
    assert "--inner-optimizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.Fenced("x"), Exit.FENCED),
        (errors.FleetMismatch("x"), Exit.SETTINGS),
        (errors.ReplicaTaken("x"), Exit.TAKEN),
        (errors.RecipeError("x"), Exit.SETTINGS),
        (errors.RoundAborted("x"), Exit.ABORTED),
        (errors.RoundTimeout("x"), Exit.STORE),
        (errors.Diverged("x"), Exit.DIVERGED),
        (errors.ObjectMissing("x"), Exit.STORE),
        (errors.Interrupted("x"), Exit.PREEMPTED),
        (KeyError("x"), Exit.ERROR),
    ],
)
def test_errors_and_exit_codes(error, code):
    assert exit_code(error) == code


@pytest.mark.processes
def test_a_spec_by_hand_trains_without_a_recipe(tmp_path):
    executor = LocalProcessExecutor(output=tmp_path / "out", env={"OMP_NUM_THREADS": "1"})
    small = (
        "model.args.width=16",
        "model.args.layers=1",
        "data.args.max_bytes=50000",
        "data.args.validation_bytes=5000",
    )
    spec = ReplicaSpec(
        0,
        1,
        (tmp_path / "store").as_uri(),
        "byte_gpt",
        {"name": "AdamW", "lr": 1e-2},
        sync_every=5,
        outer_rounds=3,
        overrides=(*small, "training.accelerator=cpu"),
    )
    handles = executor.launch_replicas([spec])
    (result,) = executor.collect(handles, timeout=200)
    assert result.status == "completed", list(executor.stream_logs(handles[0]))
    assert result.metrics["rounds"] == 3 and result.metrics["steps"] == 15 and result.metrics["digest"]
    assert result.final_checkpoint_uri == (tmp_path / "out" / "replica-0" / "final.ckpt").as_uri()
    assert any("round 2: 5 steps, fleet at 15" in line for line in executor.stream_logs(handles[0]))


@pytest.mark.filterwarnings("ignore:the run has finished")
def test_a_replica_that_was_away_for_long_joins(tmp_path, capsys):
    """Its checkpoint is of a round from which the store can't lead on any more."""
    file = tmp_path / "r.yaml"
    file.write_text(RECIPE)
    store = (tmp_path / "store").as_uri()
    command = [
        f"--recipe={file}",
        "--replica-id=0",
        "fleet.replicas=1",
        f"--rendezvous-uri={store}",
        "training.steps=20",
    ]
    command += ["autoloco.policy=fixed", "autoloco.base_horizon=2", "fleet.shared_checkpoint_every_rounds=2"]
    command += ["data.args={context: 16, batch_size: 4, max_bytes: 20000, validation_bytes: 500}"]
    command += ["training.accelerator=cpu", "scheduler.warmup_steps=0", f"--output={tmp_path / 'replica-0'}"]
    assert main(command) == 0
    place = tmp_path / "replica-0" / "checkpoints" / "replica-0"
    newest, *others = sorted(place.glob("*.ckpt"), reverse=True)
    for other in others:
        other.unlink()
    newest.rename(place / "round-000002-step-000000004.ckpt")
    capsys.readouterr()
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "its own checkpoint is of round 2, and the rounds from there" in said and "are gone: it is set aside" in said
    assert [path.parent.name for path in place.rglob("round-000002-*")] == ["behind-round-10"]
