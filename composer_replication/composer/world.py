"""What must hold of the process before Composer trains in it.

Invariant: one process, one replica. Composer reduces gradients, batch sizes and losses over its whole world at every
step, so a world that spans replicas would undo all that they gain by training alone.
"""

from __future__ import annotations

import os
import re
import warnings

import torch
from composer.callbacks import CheckpointSaver
from composer.core import State
from torch.nn.parallel import DistributedDataParallel

from composer_replication.isolate import Identity

__all__ = ["check_savers", "check_state", "check_world"]


def check_world() -> None:
    """Raises ValueError if this process belongs to a world of several: torch's group, or what the launcher set."""
    size = int(os.environ.get("WORLD_SIZE") or 1)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        size = max(size, torch.distributed.get_world_size())
    if size > 1:
        raise ValueError(
            f"this process is one of {size} in Composer's world, and a replica is one process: start the script with "
            f"`composer -n {size} -m composer_replication.run SCRIPT ...` (or call "
            "composer_replication.isolate.isolate_world() before the first import of composer)"
        )


def check_state(state: State) -> None:
    """The same for a Trainer's state, before its first step."""
    check_world()
    if isinstance(state.model, DistributedDataParallel):
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
            if not re.search(rf"(?<!\d){identity.replica}(?!\d)", folder):
                warnings.warn(
                    f"save_folder={callback.folder!r} doesn't name the replica: if replicas share that folder, their "
                    "files mix; put {run_name} into it and set RUN_NAME (composer_replication.run adds "
                    f"-replica{identity.replica} to it)",
                    stacklevel=2,
                )
