"""What is refused, with which words, and before anything is touched."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import StrategyRegistry

from composer_replication.collective.in_process import InProcessFleet
from composer_replication.isolate import Identity, isolate, read_identity
from composer_replication.lightning import AutoLoCoCallback, LocalReplicaStrategy
from composer_replication.lightning.strategy import register
from composer_replication.lightning_zero_edit import callbacks
from tests.lightning.helpers import QUIET, Tiny, callback, in_threads, loader, trainer

ROOT = Path(__file__).parent.parent.parent
WHO: dict[str, Any] = {"replica": 0, "replicas": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "base_horizon is missing"),
        ({"base_horizon": 0}, "base_horizon must be .* not 0"),
        ({"base_horizon": 10, "min_horizon": 20}, "min_horizon must be at most base_horizon"),
        ({"base_horizon": 10, "outer_lr": 0.0}, "lr must be"),
        ({"base_horizon": 10, "outer_momentum": 1.0}, "momentum must be"),
        ({"base_horizon": 10, "policy": "autolocco"}, "did you mean 'autoloco'"),
        ({"base_horizon": 10, "groth_cap": 1.1}, "there is no option 'groth_cap'; did you mean 'growth_cap'"),
        ({"base_horizon": 10, "codec": "int7"}, "int7"),
        ({"base_horizon": 10, "weighting": "token"}, "weighting must be 'equal' or 'tokens', got 'token'"),
        ({"base_horizon": 10, "buffers": "sum"}, "buffers must be 'average' or 'local'"),
        ({"base_horizon": 10, "validate_with": "both"}, "validate_with must be 'local' or 'shared'"),
        ({"base_horizon": 10, "replica_failure_policy": "ignore"}, "replica_failure_policy must be 'strict' or 'skip'"),
        ({"base_horizon": 10, "timeout": 0}, "timeout must be a positive number of seconds, got 0"),
        ({"base_horizon": 10, "timeout": "5"}, "timeout must be a positive number of seconds, got '5'"),
        ({"base_horizon": 10, "start_timeout": 0}, "start_timeout must be a positive number of seconds, got 0"),
        ({"base_horizon": 10, "start_timeout": "5"}, "start_timeout must be a positive number of seconds, got '5'"),
        ({"base_horizon": 10, "replica": "0"}, "replica must be a whole number, got '0'"),
        ({"base_horizon": 10, "replicas": 2.0}, "replicas must be a whole number, got 2.0"),
        ({"base_horizon": 10, "min_replicas": "1"}, "min_replicas must be a whole number, got '1'"),
        ({"base_horizon": 10, "checkpoint_every": "1"}, "checkpoint_every must be a whole number, got '1'"),
        ({"base_horizon": 10, "checkpoint_every": 0}, "checkpoint_every must be at least 1, got 0"),
        ({"base_horizon": 10, "checkpoint_every_rounds": 1.5}, "checkpoint_every_rounds must be a whole number, got 1"),
        ({"base_horizon": 10, "run": 3}, "run must be a name, got 3"),
        ({"base_horizon": "10"}, "base_horizon must be .*'10'"),
        ({"base_horizon": 10, "outer_lr": "0.7"}, "lr must be .*'0.7'"),
        ({"base_horizon": 10, "min_replicas": 3}, "min_replicas must be between 1 and 2, got 3"),
        ({"base_horizon": 10, "checkpoint_every_rounds": 0}, "checkpoint_every_rounds must be at least 1"),
        ({"base_horizon": 10, "replica": 2}, "replica must be between 0 and 1 in a fleet of 2, got 2"),
        ({"base_horizon": 10, "replica": -1}, "replica must be between 0 and 1 in a fleet of 2, got -1"),
        ({"base_horizon": 10, "replicas": 0}, "replicas must be at least 1, got 0"),
        ({"base_horizon": 10, "policy": "qsr"}, "alpha"),
    ],
)
def test_bad_options_are_refused_at_construction(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        AutoLoCoCallback(tmp_path.as_uri(), **{**WHO, **options})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("store", "message"),
    [(" ", "no store"), (5, "store must be a URI or an open store, got 5"), ("a\0b", "store holds a NUL byte")],
)
def test_a_store_that_can_not_be_is_refused_at_construction(store: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AutoLoCoCallback(store, **WHO, base_horizon=10)


def test_every_field_can_be_given_by_its_name(tmp_path: Path) -> None:
    ours = AutoLoCoCallback(
        tmp_path.as_uri(), **WHO, base_horizon=100, growth_cap=1.3, momentum_max=0.9, max_scale=None, warmup_steps=7
    )
    assert ours.policy.settings()["growth_cap"] == 1.3
    assert ours.policy.settings()["warmup_steps"] == 7
    assert (ours.outer.momentum_max, ours.outer.max_scale) == (0.9, None)
    assert list(tmp_path.iterdir()) == []


def test_the_place_in_the_fleet_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="COMPOSER_REPLICATION_REPLICA and COMPOSER_REPLICATION_REPLICAS"):
        AutoLoCoCallback(tmp_path.as_uri(), base_horizon=10)
    monkeypatch.setenv("COMPOSER_REPLICATION_REPLICA", "3")
    with pytest.raises(ValueError, match=r"\(replicas missing\)"):
        AutoLoCoCallback(tmp_path.as_uri(), base_horizon=10)
    monkeypatch.setenv("COMPOSER_REPLICATION_REPLICAS", "4")
    with pytest.raises(ValueError, match="no store.*COMPOSER_REPLICATION_STORE"):
        AutoLoCoCallback(base_horizon=10)
    monkeypatch.setenv("COMPOSER_REPLICATION_STORE", tmp_path.as_uri())
    assert AutoLoCoCallback(base_horizon=10).identity == Identity(replica=3, replicas=4)
    # Arguments come first, and a launcher's variables don't count unless it is named.
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert AutoLoCoCallback(base_horizon=10, replica=0).identity == Identity(replica=0, replicas=4)
    monkeypatch.delenv("COMPOSER_REPLICATION_REPLICA")
    monkeypatch.delenv("COMPOSER_REPLICATION_REPLICAS")
    assert AutoLoCoCallback(base_horizon=10, launcher="torchrun").identity == Identity(replica=1, replicas=2)
    monkeypatch.setenv("COMPOSER_REPLICATION_REPLICA", "one")
    with pytest.raises(ValueError, match="COMPOSER_REPLICATION_REPLICA must be a whole number, got 'one'"):
        AutoLoCoCallback(base_horizon=10)


def test_identity_from_launchers() -> None:
    slurm = {"SLURM_PROCID": "2", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
    assert read_identity(launcher="slurm", environ=slurm) == Identity(replica=2, replicas=8)
    assert read_identity(launcher="auto", environ=slurm) == Identity(replica=2, replicas=8)
    assert read_identity(launcher="kubernetes", replicas=3, environ={"JOB_COMPLETION_INDEX": "2"}).replica == 2
    with pytest.raises(ValueError, match="replicas missing"):
        read_identity(launcher="kubernetes", environ={"JOB_COMPLETION_INDEX": "2"})
    with pytest.raises(ValueError, match="launcher must be one of torchrun.*got 'torchrum'"):
        read_identity(launcher="torchrum", environ={})
    with pytest.raises(ValueError, match="no launcher's variables are set"):
        read_identity(launcher="auto", environ={})


def test_isolation_hides_the_launcher_and_pins_the_gpu() -> None:
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "CUDA_VISIBLE_DEVICES": "4,6"}
    assert isolate(launcher="torchrun", environ=environ) == Identity(replica=5, replicas=8)
    assert environ == {
        "CUDA_VISIBLE_DEVICES": "6",
        "COMPOSER_REPLICATION_REPLICA": "5",
        "COMPOSER_REPLICATION_REPLICAS": "8",
    }
    assert isolate(environ=environ) == Identity(replica=5, replicas=8)  # again: nothing more happens
    shared = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    isolate(launcher="torchrun", environ=shared, pin_gpu=False)
    assert "CUDA_VISIBLE_DEVICES" not in shared
    few = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "0,1"}
    with pytest.raises(ValueError, match="process 3 of its machine.*only 2 devices"):
        isolate(launcher="torchrun", environ=few)


# -- the strategy ----------------------------------------------------------------------------------------------------


def test_the_strategy_is_registered_once() -> None:
    assert "local_replica" in StrategyRegistry
    register()
    assert isinstance(Trainer(**QUIET).strategy, LocalReplicaStrategy)


@pytest.mark.parametrize("settings", [{"devices": 2}, {"num_nodes": 2}])
def test_a_replica_of_several_processes_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="one process on one device per replica.*use devices=1"):
        Trainer(**{**QUIET, **settings})


def test_a_launcher_s_world_is_left_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by torchrun as process 3 of 4, each a replica: Lightning sees one process."""
    world = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in {**world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    ours = AutoLoCoCallback("memory://", base_horizon=4, launcher="torchrun")
    fit = trainer(ours)
    assert (fit.world_size, fit.global_rank, fit.local_rank, fit.is_global_zero) == (1, 0, 0, True)
    fit.strategy.connect(Tiny())
    fit.strategy.lightning_module.trainer = fit
    assert fit.strategy.distributed_sampler_kwargs == {"num_replicas": 4, "rank": 3}


def test_other_strategies_of_several_processes_are_refused_by_the_callback() -> None:
    ours = callback(InProcessFleet(1).collectives()[0])
    with pytest.raises(ValueError, match="runs 2 processes, and a replica is one process"):
        fit = Trainer(**{**QUIET, "strategy": "ddp", "devices": 2}, callbacks=[ours])
        ours.setup(fit, Tiny(), "fit")  # what `fit` would do in each process that it starts


def test_a_foreign_process_group_is_refused(tmp_path: Path) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        trainer(callback(InProcessFleet(1).collectives()[0]), max_epochs=1).fit(Tiny(), loader(4))
    finally:
        torch.distributed.destroy_process_group()

    strategy = Trainer(**QUIET).strategy
    fake = torch.testing._internal.distributed.fake_pg.FakeStore()
    torch.distributed.init_process_group("fake", store=fake, rank=0, world_size=2)
    try:
        with pytest.raises(RuntimeError, match="default process group of 2 processes"):
            strategy.setup_environment()
    finally:
        torch.distributed.destroy_process_group()


def test_no_process_group_is_ever_made() -> None:
    def replica(_: int, collective: Any) -> bool:
        fit = trainer(callback(collective), max_epochs=1)
        fit.fit(Tiny(), loader(16))
        return torch.distributed.is_initialized()

    assert in_threads(2, replica) == [False, False]


def test_a_trainer_of_the_other_package_gets_a_clear_error() -> None:
    other = type("Trainer", (), {"__module__": "pytorch_lightning.trainer.trainer"})()
    with pytest.raises(TypeError, match="pytorch_lightning.*use `import lightning.pytorch as pl` throughout"):
        callback(InProcessFleet(1).collectives()[0]).setup(other, Tiny(), "fit")


def test_no_optimizer_and_no_parameter() -> None:
    class Without(Tiny):
        def configure_optimizers(self) -> None:
            return None

    with pytest.warns(UserWarning, match="`LightningModule.configure_optimizers` returned `None`"):
        with pytest.raises(ValueError, match="no optimizer"):
            trainer(callback(InProcessFleet(1).collectives()[0]), max_epochs=1).fit(Without(), loader(4))


# -- checkpoint folders ----------------------------------------------------------------------------------------------


def test_model_checkpoints_of_several_replicas_get_folders_of_their_own(tmp_path: Path) -> None:
    def replica(index: int, collective: Any) -> str:
        logger = CSVLogger(tmp_path, name="runs", version=7)
        save = ModelCheckpoint()
        fit = trainer(
            callback(collective),
            save,
            max_epochs=1,
            logger=logger if index else False,
            enable_checkpointing=True,
            default_root_dir=tmp_path,
            log_every_n_steps=1,
        )
        fit.fit(Tiny(), loader(16))
        return str(Path(save.best_model_path).parent)

    found = in_threads(2, replica)
    assert found == [
        str(tmp_path / "checkpoints" / "replica-0"),
        str(tmp_path / "runs" / "version_7" / "checkpoints" / "replica-1"),
    ]


def test_a_shared_checkpoint_folder_is_told(tmp_path: Path) -> None:
    collectives = InProcessFleet(2, timeout_seconds=0.01).collectives()
    ours = callback(collectives[1])
    fit = Trainer(
        **{**QUIET, "enable_checkpointing": True}, callbacks=[ours, ModelCheckpoint(dirpath=tmp_path / "all")]
    )
    with pytest.warns(UserWarning, match="doesn't name the replica.*replica-1"):
        ours.setup(fit, Tiny(), "fit")
    named = Trainer(
        **{**QUIET, "enable_checkpointing": True}, callbacks=[ours, ModelCheckpoint(dirpath=tmp_path / "replica-1")]
    )
    ours.setup(named, Tiny(), "fit")  # a warning would be an error here


# -- zero-edit mode --------------------------------------------------------------------------------------------------


def test_zero_edit_mode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert callbacks() == []
    monkeypatch.setenv("COMPOSER_REPLICATION_ENABLE", "1")
    with pytest.raises(ValueError, match="COMPOSER_REPLICATION_SETTINGS"):
        callbacks()
    settings = tmp_path / "settings.json"
    monkeypatch.setenv("COMPOSER_REPLICATION_SETTINGS", str(settings))
    with pytest.raises(ValueError, match="can't be read"):
        callbacks()
    settings.write_text("[1]")
    with pytest.raises(ValueError, match="must hold a JSON object, got a list"):
        callbacks()
    settings.write_text(json.dumps({"base_horizon": 4, "policy": "fixed"}))
    monkeypatch.setenv("COMPOSER_REPLICATION_REPLICA", "0")
    monkeypatch.setenv("COMPOSER_REPLICATION_REPLICAS", "1")
    monkeypatch.setenv("COMPOSER_REPLICATION_STORE", (tmp_path / "run").as_uri())
    (ours,) = callbacks()
    assert isinstance(ours, AutoLoCoCallback) and ours.policy.name == "fixed"


def as_installed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A distribution with pyproject.toml's own line for Lightning."""
    line = next(
        line for line in (ROOT / "pyproject.toml").read_text().splitlines() if "lightning_zero_edit:callbacks" in line
    )
    info = folder / "as_installed-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: as-installed\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[lightning.pytorch.callbacks_factory]\n{line.replace(chr(34), '')}\n")
    monkeypatch.syspath_prepend(folder)


def test_zero_edit_mode_through_lightning_s_entry_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As installed: Lightning finds the entry point of pyproject.toml by itself."""
    declared = {entry.value for entry in metadata.entry_points(group="lightning.pytorch.callbacks_factory")}
    if "composer_replication.lightning_zero_edit:callbacks" not in declared:  # the package is only on the path
        as_installed(monkeypatch, tmp_path)
    assert not any(isinstance(one, AutoLoCoCallback) for one in Trainer(**QUIET).callbacks)
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"base_horizon": 4, "policy": "fixed"}))
    for name, value in (("ENABLE", "1"), ("SETTINGS", settings), ("REPLICA", "0"), ("REPLICAS", "1")):
        monkeypatch.setenv(f"COMPOSER_REPLICATION_{name}", str(value))
    monkeypatch.setenv("COMPOSER_REPLICATION_STORE", (tmp_path / "run").as_uri())
    fit = Trainer(**{**QUIET, "strategy": "auto"}, max_epochs=1)
    fit.fit(Tiny(), loader(6))
    (ours,) = [one for one in fit.callbacks if isinstance(one, AutoLoCoCallback)]
    assert [summary.steps for summary in ours.rounds] == [4, 2]
    assert (tmp_path / "run" / "fleet.json").is_file()


def test_zero_edit_mode_is_free_when_it_is_off() -> None:
    code = (
        "import sys, composer_replication.lightning_zero_edit as z\n"
        "print(z.callbacks(), 'torch' in sys.modules or 'lightning' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["[]", "False"]


def test_building_a_callback_touches_nothing(tmp_path: Path) -> None:
    AutoLoCoCallback((tmp_path / "run").as_uri(), replica=0, replicas=2, base_horizon=10)
    assert list(tmp_path.iterdir()) == []
