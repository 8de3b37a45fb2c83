"""What is refused, with which words, and before anything is touched."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy, StrategyRegistry

from composer_replication.collective.in_process import InProcessFleet
from composer_replication.isolate import Identity, isolate, read_identity
from composer_replication.lightning import AutoLoCoCallback, LocalReplicaFSDPStrategy, LocalReplicaStrategy
from composer_replication.lightning.strategy import register
from composer_replication.lightning.world import check_strategy
from composer_replication.lightning_zero_edit import callbacks
from tests.lightning.helpers import QUIET, Tiny, callback, in_threads, loader, trainer

ROOT = Path(__file__).parent.parent.parent


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


@pytest.mark.parametrize(
    ("environ", "devices", "message"),
    [
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "1"}, 2, "started 4 processes.*is a replica of 2.*--ranks-per-replica 2"),
        ({"WORLD_SIZE": "3", "LOCAL_RANK": "1"}, 2, "started 3 processes.*if they are one, use devices=3"),
        (
            {"COMPOSER_REPLICATION_RANK": "0", "COMPOSER_REPLICATION_RANKS": "2"},
            4,
            "one of a replica of 2.*asks for 4 devices in all: use devices=2",
        ),
        ({"COMPOSER_REPLICATION_RANK": "1", "COMPOSER_REPLICATION_RANKS": "2"}, 1, "asks for 1 devices in all"),
        ({"COMPOSER_REPLICATION_RANK": "2", "COMPOSER_REPLICATION_RANKS": "2"}, 2, "contradict each other: unset both"),
    ],
)
@pytest.mark.parametrize("strategy", ["local_replica", "local_replica_fsdp"])
def test_a_world_that_isn_t_the_replica_s_is_refused(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], devices: int, message: str, strategy: str
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        Trainer(**{**QUIET, "devices": devices, "strategy": strategy})


def test_tensor_parallelism_inside_a_replica_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size must be 1, got 2"):
        LocalReplicaFSDPStrategy(tensor_parallel_size=2)


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


def test_strategies_that_a_replica_of_several_processes_can_t_use_are_refused() -> None:
    fit = Trainer(**{**QUIET, "strategy": "ddp", "devices": 2})
    check_strategy(fit)
    fit._accelerator_connector.strategy = FSDPStrategy(parallel_devices=fit.strategy.parallel_devices)
    fit.strategy.cluster_environment = LightningEnvironment()
    fit.strategy.cluster_environment.set_world_size(2)
    with pytest.raises(ValueError, match="replica of 2 processes can't use FSDPStrategy.*'local_replica_fsdp'"):
        check_strategy(fit)


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
        **{**QUIET, "enable_checkpointing": True},
        callbacks=[ours, ModelCheckpoint(dirpath=tmp_path / "of" / "the" / "run")],
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
