"""`strategy="local_replica"` and `"local_replica_fsdp"`: a Trainer's processes are one replica; only its training data
knows of the others.

Invariant: the default process group is this replica's alone, or isn't there (one process). Everything that Lightning
reduces, broadcasts or waits for stays inside the replica; the fleet meets nowhere but in the callback's rounds.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.states import RunningStage
from torch.nn import Module
from typing_extensions import override

from composer_replication.adapter.data import rank_share
from composer_replication.isolate import RANK, RANKS, Identity, read_identity, read_rank

__all__ = ["FSDP_NAME", "NAME", "LocalReplicaFSDPStrategy", "LocalReplicaStrategy", "Replica", "register"]

NAME, FSDP_NAME = "local_replica", "local_replica_fsdp"


class ReplicaEnvironment(LightningEnvironment):
    """A world of one, whatever torchrun or a scheduler has set."""

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @override
    def world_size(self) -> int:
        return 1

    @override
    def global_rank(self) -> int:
        return 0

    @override
    def local_rank(self) -> int:
        return 0

    @override
    def node_rank(self) -> int:
        return 0

    @override
    def teardown(self) -> None:
        """The launcher's variables aren't ours to remove."""


class Replica:
    """What the strategies of a replica have in common: its share of the data, and the checks of its world.

    The share is that of the AutoLoCoCallback in the Trainer, of `replica` and `replicas`, or of the environment. Only
    training loaders are cut between replicas: each replica validates on everything.
    """

    _identity: Identity | None = None

    def _name_replica(self, replica: int | None, replicas: int | None) -> None:
        if (replica is None) != (replicas is None):
            raise ValueError("give replica and replicas together, or neither")
        self._identity = None if replica is None else read_identity(replica=replica, replicas=replicas)

    @property
    def identity(self) -> Identity:
        """Whose training data this is."""
        if self._identity is not None:
            return self._identity
        trainer = self._trainer_of_mine()
        for callback in getattr(trainer, "callbacks", ()):
            identity = getattr(callback, "identity", None)
            if isinstance(identity, Identity):
                return identity
        return read_identity()

    def _trainer_of_mine(self) -> Trainer | None:
        module = self.lightning_module  # type: ignore[attr-defined]
        return module._trainer if module is not None else None

    def _sampler_kwargs(self, rank: int, ranks: int) -> dict[str, Any]:
        trainer = self._trainer_of_mine()
        if trainer is not None and trainer.state.stage not in (RunningStage.TRAINING, None):
            return {"num_replicas": ranks, "rank": rank}
        share = rank_share(self.identity, rank, ranks)
        return {"num_replicas": share.replicas, "rank": share.shard}


def check_launch(ranks: int, local_ranks: int) -> None:
    """Before anything starts: the launcher's world must be this replica's. Raises ValueError with the remedy."""
    rank, cut = read_rank()
    del rank
    found = int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 0)
    starts_its_own = "LOCAL_RANK" not in os.environ and "SLURM_PROCID" not in os.environ
    if RANKS in os.environ and cut != ranks:
        raise ValueError(
            f"this process is one of a replica of {cut} ({RANKS}), but its Trainer asks for {ranks} devices in all: "
            f"use devices={cut} (num_nodes=1), or devices='auto' on GPUs"
        )
    if found and found != ranks and not starts_its_own:
        raise ValueError(
            f"the launcher started {found} processes, but this Trainer is a replica of {ranks}: if they are several "
            f"replicas, start the script with `-m composer_replication.run --ranks-per-replica {ranks} SCRIPT ...` (or "
            f"call composer_replication.isolate.isolate_world({ranks}) before the first trainer import); if they are "
            f"one, use devices={max(found // max(ranks // local_ranks, 1), 1)}"
        )


def check_group(name: str, ranks: int) -> None:
    """A default process group that somebody else has made must be this replica's. Raises RuntimeError."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        size = torch.distributed.get_world_size()
        if size != ranks:
            what = "is one process" if ranks == 1 else f"has {ranks} processes"
            raise RuntimeError(
                f"strategy='{name}' found a default process group of {size} processes: this replica {what}, and "
                "Lightning would reduce and wait across the whole group; don't initialise it in this process"
            )


class LocalReplicaStrategy(Replica, DDPStrategy):
    """One replica: one process, or several (`devices=K`) that average their gradients at every step as DDP does.

    With several, the launcher's world is this replica's: one launch for each replica, or one for all that
    `composer_replication.run --ranks-per-replica K` has cut. Takes DDPStrategy's arguments. See `Replica`.
    """

    def __init__(self, replica: int | None = None, replicas: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._name_replica(replica, replicas)

    @property
    def _ranks(self) -> int:
        return self.num_processes * self.num_nodes

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices, "the Trainer assigns the device before it asks for it"
        return self.parallel_devices[self.local_rank if self._ranks > 1 else 0]

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return self._sampler_kwargs(self.global_rank, self._ranks)

    @override
    def _configure_launcher(self) -> None:
        if self._ranks > 1:
            check_launch(self._ranks, self.num_processes)
            super()._configure_launcher()
            return
        if read_rank()[1] > 1:
            check_launch(1, 1)
        self.cluster_environment = ReplicaEnvironment()
        self.set_world_ranks()
        self._launcher = None  # nothing to start: this process is the replica

    @override
    def setup_distributed(self) -> None:
        if self._ranks > 1:
            check_group(NAME, self._ranks)
            super().setup_distributed()
            _remember(self.global_rank, self._ranks)
            return
        reset_seed()
        self.set_world_ranks()
        check_group(NAME, 1)

    @override
    def setup(self, trainer: Trainer) -> None:
        if self._ranks > 1:
            super().setup(trainer)
        else:
            Strategy.setup(self, trainer)  # DDP's own would synchronise with other processes

    @override
    def _setup_model(self, model: Module) -> Any:
        return super()._setup_model(model) if self._ranks > 1 else model

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Nothing to add: DDP's advice doesn't apply."""


class LocalReplicaFSDPStrategy(Replica, ModelParallelStrategy):
    """One replica of several processes that hold the model in rows: FSDP2, as `configure_model` applies it.

        def configure_model(self):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    Takes ModelParallelStrategy's arguments; all processes are data-parallel. See `Replica` and `LocalReplicaStrategy`.
    """

    def __init__(self, replica: int | None = None, replicas: int | None = None, **kwargs: Any) -> None:
        if kwargs.setdefault("tensor_parallel_size", 1) != 1:
            raise ValueError(
                f"tensor_parallel_size must be 1, got {kwargs['tensor_parallel_size']!r}: a replica can be sharded "
                "by rows (FSDP2) only"
            )
        super().__init__(**kwargs)
        self._name_replica(replica, replicas)

    @property
    def _ranks(self) -> int:
        return self.num_processes * self.num_nodes

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return self._sampler_kwargs(self.global_rank, self._ranks)

    @override
    def _configure_launcher(self) -> None:
        check_launch(self._ranks, self.num_processes)
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        check_group(FSDP_NAME, self._ranks)
        if self._data_parallel_size == "auto":
            self._data_parallel_size = self._ranks
        super().setup_environment()
        _remember(self.global_rank, self._ranks)


def _remember(rank: int, ranks: int) -> None:
    """For what asks the environment, in loader workers too (`shard_iterable`)."""
    os.environ[RANK], os.environ[RANKS] = str(rank), str(ranks)


def register() -> None:
    """Make the names known to Lightning; harmless when called again."""
    for name, made, what in (
        (NAME, LocalReplicaStrategy, "One replica of a fleet: one process, or several with DDP inside"),
        (FSDP_NAME, LocalReplicaFSDPStrategy, "One replica of a fleet: several processes with FSDP2 inside"),
    ):
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, made, description=what)
