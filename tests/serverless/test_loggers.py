"""A recipe's loggers, by their own libraries and offline: one run a replica, grouped, against the fleet's steps."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer_replication.adapter.driver import Driver
from composer_replication.cli import main
from composer_replication.diloco.serverless import loggers
from composer_replication.diloco.serverless.locks import locked
from composer_replication.diloco.serverless.loggers import LoggedRun, check_loggers, ensure_experiment, line_up
from composer_replication.errors import RecipeError
from composer_replication.isolate import Identity
from composer_replication.recipe import claim_folder, recipe_from
from tests.serverless.logged import Table, read_csv, read_mlflow, read_tensorboard, read_wandb

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # the trainers' advice on workers, batches and loaders
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # MLflow's on keeping runs in files
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the loggers' libraries about one another
]

RECIPE = """\
name: logged
model: {name: byte_gpt, args: {width: 16, layers: 1, heads: 2, context: 16}}
data: {name: text_bytes, args: {context: 16, batch_size: 4, max_bytes: 20000, validation_bytes: 800}}
training: {steps: 20, log_every: 5, accelerator: cpu}
autoloco: {policy: fixed, base_horizon: 8}
fleet: {replicas: 1}
logging: {loggers: [csv, tensorboard, wandb, mlflow], project: paper, tags: {site: here}}
"""
NEEDED = ("tensorboard", "wandb", "mlflow")


@pytest.fixture(params=["lightning", "composer"])
def trainer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    for module in (request.param, *NEEDED):
        if find_spec(module) is None:
            pytest.skip(f"{module} isn't installed")
    for name, value in {
        "PL_GLOBAL_SEED": "1",  # Lightning leaves them behind
        "PL_SEED_WORKERS": "1",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
    }.items():
        monkeypatch.setenv(name, value)
    return request.param


def tables(trainer: str, folder: Path, replica: int) -> dict[str, Table]:
    """What each logger has, of one replica; says that runs are named and grouped as they should be."""
    own = folder / f"replica-{replica}"
    names = {"lightning": ("csv/version_0/metrics.csv", "tensorboard")}
    path, events = names.get(trainer, ("csv/metrics.csv", f"tensorboard/logged-replica{replica}"))
    run, wandb = read_wandb(own)
    assert (run.run_group, run.job_type, run.display_name) == (folder.name, "replica", f"{folder.name}-r{replica}")
    assert run.project == "paper" and "site=here" in run.tags
    tags, params, mlflow = read_mlflow((folder.parent / "mlruns").as_uri(), "paper")[f"{folder.name}-r{replica}"]
    assert tags["composer_replication.run"] == folder.name and tags["composer_replication.replica"] == str(replica)
    assert tags["site"] == "here" and params["base_horizon"] == "8" and params["replica"] == str(replica)
    found = {"csv": read_csv(own / path), "tensorboard": read_tensorboard(own / events)}
    return {**found, "wandb": wandb, "mlflow": mlflow}


def rounds_of(table: Table) -> dict[int, dict[str, float]]:
    """In their order, with the step at which each is logged."""
    return {
        int(row["autoloco/round"]): {"at": at, **row} for at, row in sorted(table.items()) if "autoloco/round" in row
    }


def check_rounds(found: dict[str, Table], *, replicas: int) -> None:
    for logger, table in found.items():
        rounds = rounds_of(table)
        assert sorted(rounds) == [0, 1, 2], logger
        # A round is logged at the step of its last batch; Lightning counts steps from 0.
        assert [row["autoloco/position"] - row["at"] in (0, 1) for row in rounds.values()] == [True] * 3, logger
        assert [row["autoloco/interval_steps"] for row in rounds.values()] == [8, 8, 4], logger
        for count, row in enumerate(rounds.values(), 1):
            assert row["autoloco/train_seconds"] > 0 and row["autoloco/bytes_sent"] >= 0, logger
            assert row["autoloco/tokens"] == replicas * 16 * 4 * min(8 * count, 20), logger
            assert row["autoloco/loss"] == pytest.approx(rounds_of(found["csv"])[count - 1]["autoloco/loss"])
        others = {name for row in table.values() for name in row if "loss" in name and "autoloco" not in name}
        assert others, f"{logger} has the trainer's own loss too"


def test_all_four_at_once(trainer: str, tmp_path: Path) -> None:
    recipe = claim_folder(recipe_from(RECIPE, [f"trainer={trainer}", f"output={tmp_path / 'one'}"]))
    assert recipe.logging.group == "one" and recipe.output is not None and recipe.store.uri is not None
    folder = Path(recipe.output) / "replica-0"
    folder.mkdir()
    replica = import_module(f"composer_replication.diloco.serverless.{trainer}_replica")
    result = replica.train(recipe, Identity(replica=0, replicas=1), recipe.store.uri, folder)
    found = tables(trainer, tmp_path / "one", 0)
    check_rounds(found, replicas=1)
    for logger, table in found.items() if trainer == "lightning" else ():  # Composer's are as of any validation
        final = {at: row["final/validation_loss"] for at, row in table.items() if "final/validation_loss" in row}
        assert final == {20: pytest.approx(result["validation_loss"])}, logger
    # Started again, it goes on with the runs that it had; that of MLflow would else be there twice.
    replica.train(recipe, Identity(replica=0, replicas=1), recipe.store.uri, folder)
    assert list(read_mlflow((tmp_path / "mlruns").as_uri(), "paper")) == ["one-r0"]
    assert len({path.stem for path in folder.glob("wandb/offline-run-*/*.wandb")}) == 1
    first = folder / ("csv/version_0" if trainer == "lightning" else "csv") / "metrics.csv"
    assert sorted(rounds_of(read_csv(first))) == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.processes
def test_a_launched_fleet_logs_under_one_group(trainer: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    output = tmp_path / "pair"
    words = [f"trainer={trainer}", f"output={output}", "fleet.replicas=2", "training.threads=1"]
    assert main(["launch", str(file), *words, "--plain"]) == 0
    for replica in (0, 1):
        check_rounds(tables(trainer, output, replica), replicas=2)


@pytest.mark.parametrize("place", ["mlruns", "file", "nowhere/mlruns"])
def test_replicas_that_start_together_share_one_experiment(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trainer's logger looks and then makes: two replicas did so at once, and the second one failed."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    uri = (tmp_path / "mlruns").as_uri() if place == "file" else place
    run = LoggedRun(group="one", name="one-r0", folder=tmp_path, project="paper", tags={}, tracking_uri=uri)
    together = threading.Barrier(6)

    def start(_: int) -> None:
        together.wait()
        ensure_experiment(run)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(start, range(6)))
    assert [one.name for one in mlflow.MlflowClient(uri).search_experiments() if one.name != "Default"] == ["paper"]


@pytest.mark.parametrize("there", [True, False])
def test_a_server_that_was_asked_twice_says_no_to_one(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    found = iter([None, SimpleNamespace(name="paper") if there else None])

    def refuse(self: Any, name: str) -> None:
        raise mlflow.exceptions.MlflowException(f"{name} is refused")

    monkeypatch.setattr(mlflow.MlflowClient, "get_experiment_by_name", lambda self, name: next(found))
    monkeypatch.setattr(mlflow.MlflowClient, "create_experiment", refuse)
    run = LoggedRun(
        group="g", name="n", folder=Path(), project="paper", tags={}, tracking_uri="http://nowhere.invalid:1"
    )
    with nullcontext() if there else pytest.raises(mlflow.exceptions.MlflowException, match="refused"):
        ensure_experiment(run)


@pytest.mark.parametrize("uri", ["databricks", "databricks-uc", "uc", "databricks://profile", "http://host:1/a"])
def test_a_server_needs_no_lock(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setattr(mlflow.MlflowClient, "__init__", lambda self, uri: None)
    monkeypatch.setattr(mlflow.MlflowClient, "get_experiment_by_name", lambda self, name: name)
    monkeypatch.chdir(tmp_path)
    ensure_experiment(LoggedRun(group="g", name="n", folder=Path(), project="p", tags={}, tracking_uri=uri))
    assert list(tmp_path.iterdir()) == []


def test_who_waits_in_vain_for_its_turn_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setattr(loggers, "_WAIT_SECONDS", 0.1)
    uri = (tmp_path / "mlruns").as_uri()
    with locked(tmp_path / ".mlruns.lock") as free:
        assert free
        ensure_experiment(LoggedRun(group="g", name="n", folder=tmp_path, project="p", tags={}, tracking_uri=uri))
    assert mlflow.MlflowClient(uri).get_experiment_by_name("p") is not None


# -- what needs no training --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{loggers: [wandv]}", "logging.loggers.0 must be one of csv, tensorboard, wandb, mlflow, not 'wandv'"),
        ("{loggers: [csv, csv]}", "logging.loggers must be different loggers"),
        ("{loggers: [wandb], api_key: abc}", "logging.api_key looks like a credential.*environment"),
        ("{loggers: [mlflow], tracking_uri: 'https://me:pass@host'}", "logging.tracking_uri: the URI holds a password"),
        ("{logers: [csv]}", "section 'logging' has no key 'logers'. Did you mean 'loggers'"),
    ],
)
def test_what_a_recipe_may_not_say_of_loggers(line: str, message: str) -> None:
    text = RECIPE.replace(RECIPE.splitlines()[-1], f"logging: {line}")
    with pytest.raises(RecipeError, match=message):
        recipe_from(text)


def test_a_trainer_with_loggers_of_its_own_is_not_given_others() -> None:
    with pytest.raises(RecipeError, match="training.trainer_args.logger.*leave it or logging.loggers out"):
        recipe_from(RECIPE, ["training.trainer_args.logger=true"])


def test_a_missing_library_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from composer_replication.diloco.serverless import loggers

    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    for name, package in (("wandb", "wandb"), ("tensorboard", "tensorboard"), ("mlflow", "mlflow-skinny")):
        with pytest.raises(RecipeError, match=f"{name} isn't installed.*pip install {package}"):
            check_loggers(recipe_from(RECIPE, [f"logging.loggers=[{name}]"]))
    check_loggers(recipe_from(RECIPE, ["logging.loggers=[csv]"]))


def test_mlflow_needs_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    from composer_replication.diloco.serverless import loggers

    monkeypatch.setattr(loggers, "find_spec", lambda name: True)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    recipe = recipe_from(RECIPE, ["logging.loggers=[mlflow]"])
    with pytest.raises(RecipeError, match="logging.tracking_uri: say where MLflow is.*MLFLOW_TRACKING_URI"):
        check_loggers(recipe)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:5000")
    check_loggers(recipe)


def test_a_restarted_replica_finds_its_runs_again(tmp_path: Path) -> None:
    run = LoggedRun.of(recipe_from(RECIPE), Identity(replica=3, replicas=4), tmp_path)
    assert (run.group, run.name, run.remembered("wandb")) == ("logged", "logged-r3", None)
    first = run.id_of("wandb")
    run.remember("mlflow", "abc")
    again = LoggedRun.of(recipe_from(RECIPE), Identity(replica=3, replicas=4), tmp_path)
    assert again.id_of("wandb") == first and again.remembered("mlflow") == "abc"


def test_a_replica_that_missed_steps_logs_where_the_fleet_is() -> None:
    class Destination:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self.seen.append((step, dict(metrics)))

    skipped = 0
    logger = line_up(Destination(), lambda: skipped)
    logger.log_metrics({"loss": 3.0}, 4)
    skipped = 50  # it was away for some rounds
    logger.log_metrics(metrics={"loss": 2.0}, step=5)
    logger.log_metrics({"text": 1.0})
    assert logger.seen == [(4, {"loss": 3.0}), (55, {"loss": 2.0}), (None, {"text": 1.0})]


def test_tokens_of_the_run_are_told_by_those_who_saw_all_of_it() -> None:
    def told(driver: Any, *rounds: tuple[int, int | None]) -> list[int | None]:
        return [Driver._tokens_up_to(driver, SimpleNamespace(round=r, tokens=t)) for r, t in rounds]  # type: ignore

    beginner = SimpleNamespace(_fleet_tokens=(0, 0))
    assert told(beginner, (0, 10), (1, 20), (2, 5)) == [10, 30, 35]
    assert told(beginner, (5, 10), (6, 10)) == [None, None], "it was away for two rounds"
    assert told(SimpleNamespace(_fleet_tokens=(0, 0)), (4, 10), (5, 10)) == [None, None], "it came late"
    assert told(SimpleNamespace(_fleet_tokens=(0, 0)), (0, None), (1, 10)) == [None, None], "tokens weren't counted"


def test_composer_s_table_goes_on_and_gets_new_columns(tmp_path: Path) -> None:
    pytest.importorskip("composer")
    from composer_replication.composer import CSVLogger

    path = tmp_path / "deep" / "metrics.csv"
    one = CSVLogger(path)
    one.log_metrics({"loss": 2.0}, 1)
    one.log_metrics({"loss": 1.5, "autoloco/round": 0}, 2)
    with path.open("a") as file:
        file.write("3")  # killed in the middle of a line
    again = CSVLogger(path)
    again.log_metrics({"loss": 1.0}, 3)
    assert read_csv(path) == {1: {"loss": 2.0}, 2: {"loss": 1.5, "autoloco/round": 0.0}, 3: {"loss": 1.0}}
    assert path.read_text().splitlines()[0] == "step,loss,autoloco/round"
