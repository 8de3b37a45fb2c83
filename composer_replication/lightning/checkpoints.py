"""Where a Lightning Trainer's own checkpoints go when several replicas write them.

Invariant: replicas that share a disk never write to the same default folder.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from composer_replication.adapter.files import names_replica, write_checkpoint, write_folder
from composer_replication.diloco.ranks.channel import Ranks
from composer_replication.isolate import Identity

__all__ = ["save_replica", "separate_checkpoints"]


def save_replica(trainer: Trainer, directory: Path, replica: int, ranks: Ranks | None, **where: int) -> None:
    """Write a replica's own checkpoint, as `write_checkpoint` does; `where` are its round, step and fit.

    A sharded one (FSDP2) is a folder, that every rank writes its shard into.
    """
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    if ranks is None:
        write_checkpoint(directory, replica, checkpoint, **where)
    elif getattr(trainer.strategy, "_save_distributed_checkpoint", False):
        write_folder(
            directory, replica, ranks, lambda draft: trainer.strategy.save_checkpoint(checkpoint, draft), **where
        )
    else:
        ranks.on_first(lambda: write_checkpoint(directory, replica, checkpoint, **where))


def separate_checkpoints(trainer: Trainer, identity: Identity) -> None:
    """Give each replica's ModelCheckpoint a folder of its own, for replicas often share a disk."""
    if identity.replicas == 1:
        return
    own = f"replica-{identity.replica}"
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        if callback.dirpath is None:
            callback.dirpath = os.path.join(_default_folder(trainer), own)
        elif not names_replica(str(callback.dirpath), identity.replica):
            warnings.warn(
                f"ModelCheckpoint(dirpath={str(callback.dirpath)!r}) doesn't name the replica: if replicas share that "
                f"folder, their files mix; leave dirpath out, or put {own} into it",
                stacklevel=2,
            )


def _default_folder(trainer: Trainer) -> str:
    """Where a ModelCheckpoint without dirpath would write."""
    if not trainer.loggers:
        return os.path.join(trainer.default_root_dir, "checkpoints")
    logger = trainer.loggers[0]
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return os.path.join(logger.save_dir or trainer.default_root_dir, str(logger.name), version, "checkpoints")
