"""What must hold of the process before Composer trains in it.

Invariant: one world, one replica, of one process or several. Composer reduces gradients, batch sizes and losses over
its whole world at every step, so a world that spans replicas would undo all that they gain by training alone.
"""

from __future__ import annotations

import os
import warnings

import torch
from composer.callbacks import CheckpointSaver
from composer.core import State
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from composer_replication.adapter.files import names_replica
from composer_replication.isolate import Identity, read_rank

__all__ = ["check_savers", "check_state", "check_world"]


def check_world() -> None:
    """Raises ValueError if this process belongs to a world that isn't its replica: torch's group, or the launcher's."""
    size = int(os.environ.get("WORLD_SIZE") or 1)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        size = max(size, torch.distributed.get_world_size())
    ranks = read_rank()[1]
    if size != ranks:
        raise ValueError(
            f"this process is one of {size} in Composer's world, and a replica is {_processes(ranks)}: start the "
            f"script with `composer -n {size} -m composer_replication.run SCRIPT ...`, and --ranks-per-replica K "
            "before SCRIPT if K processes are a replica (or call composer_replication.isolate.isolate_world(K) before "
            "the first import of composer)"
        )


def _processes(count: int) -> str:
    return "one process" if count == 1 else f"{count} processes"


def check_state(state: State) -> None:
    """The same for a Trainer's state, before its first step."""
    check_world()
    if any(isinstance(module, FullyShardedDataParallel) for module in state.model.modules()):
        raise ValueError(
            "the model is wrapped in FSDP1, which flattens its parameters: leave parallelism_config out (DDP inside "
            "the replica), or use FSDP2"
        )
    if state.fsdp_sharded_state_dict_enabled:
        raise ValueError(
            "state_dict_type is 'sharded', and a sharded checkpoint of Composer's would drop the outer state, which is "
            "rank 0's: use FSDP2Config(state_dict_type='full')"
        )
    if isinstance(state.model, DistributedDataParallel) and read_rank()[1] == 1:
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, which averages gradients at every step: leave the "
            "wrapping out; AutoLoCo is what connects the replicas"
        )


def check_savers(state: State, identity: Identity) -> None:
    """Warn if replicas that share a disk would write their checkpoints over each other."""
    if identity.replicas == 1:
        return
    for callback in state.callbacks:
        if isinstance(callback, CheckpointSaver):
            folder = str(callback.folder).replace("{run_name}", state.run_name)
            if not names_replica(folder, identity.replica):
                warnings.warn(
                    f"save_folder={callback.folder!r} doesn't name the replica: if replicas share that folder, their "
                    "files mix; put {run_name} into it and set RUN_NAME (composer_replication.run adds "
                    f"-replica{identity.replica} to it)",
                    stacklevel=2,
                )
