"""`strategy="local_replica"`: this process is a whole replica; only its training data knows of the others.

Invariant: the default process group is never set up. Everything that Lightning reduces, broadcasts or waits for stays
inside this process; the fleet meets nowhere but in the callback's rounds.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.states import RunningStage
from torch.nn import Module
from typing_extensions import override

from composer_replication.isolate import Identity, read_identity

__all__ = ["NAME", "LocalReplicaStrategy", "register"]

NAME = "local_replica"


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


class LocalReplicaStrategy(DDPStrategy):
    """One process on one device, with its own share of the training data.

    The share is that of the AutoLoCoCallback in the Trainer, of `replica` and `replicas`, or of the environment.
    Only training loaders are cut: each replica validates on everything.
    """

    def __init__(self, replica: int | None = None, replicas: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if (replica is None) != (replicas is None):
            raise ValueError("give replica and replicas together, or neither")
        self._identity = None if replica is None else read_identity(replica=replica, replicas=replicas)

    @property
    def identity(self) -> Identity:
        """Whose training data this is."""
        if self._identity is not None:
            return self._identity
        module = self.lightning_module
        trainer = module._trainer if module is not None else None
        for callback in getattr(trainer, "callbacks", ()):
            identity = getattr(callback, "identity", None)
            if isinstance(identity, Identity):
                return identity
        return read_identity()

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices, "the Trainer assigns the device before it asks for it"
        return self.parallel_devices[0]

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        module = self.lightning_module
        trainer = module._trainer if module is not None else None
        if trainer is not None and trainer.state.stage not in (RunningStage.TRAINING, None):
            return {"num_replicas": 1, "rank": 0}
        return {"num_replicas": self.identity.replicas, "rank": self.identity.replica}

    @override
    def _configure_launcher(self) -> None:
        if self.num_processes > 1 or self.num_nodes > 1:
            raise ValueError(
                f"strategy='{NAME}' runs one process on one device per replica, but this Trainer asks for "
                f"{self.num_processes} device(s) on {self.num_nodes} node(s): use devices=1 (or devices=[index]) and "
                "num_nodes=1, and start one process for each replica"
            )
        self.cluster_environment = ReplicaEnvironment()
        self.set_world_ranks()
        self._launcher = None  # nothing to start: this process is the replica

    @override
    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            size = torch.distributed.get_world_size()
            if size != 1:
                raise RuntimeError(
                    f"strategy='{NAME}' found a default process group of {size} processes: a replica is one process, "
                    "and Lightning would reduce and wait across the whole group; don't initialise it in this process"
                )

    @override
    def setup(self, trainer: Trainer) -> None:
        Strategy.setup(self, trainer)  # DDP's own would synchronise with other processes

    @override
    def _setup_model(self, model: Module) -> Module:
        return model

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Nothing to add: DDP's advice doesn't apply."""


def register() -> None:
    """Make the name known to Lightning; harmless when called again."""
    if NAME not in StrategyRegistry:
        StrategyRegistry.register(
            NAME, LocalReplicaStrategy, description="One replica of a fleet: one process, its own share of the data"
        )
