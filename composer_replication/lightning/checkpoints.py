"""One replica's own checkpoints: whole files, the last two, easy to find again.

Invariant: a file under its final name is complete and on disk; trainer state and outer state are in the same file, so
that no restart can pair newer data with older weights.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from composer_replication.isolate import Identity

__all__ = ["latest_checkpoint", "separate_checkpoints", "write_checkpoint"]

_NAME = re.compile(r"round-(\d{6,})-step-(\d{9,})\.ckpt")


def latest_checkpoint(directory: str | os.PathLike[str], replica: int) -> str | None:
    """The newest complete checkpoint of `replica` under `directory`, for `trainer.fit(ckpt_path=...)`; None if none."""
    found = _complete(Path(directory) / f"replica-{replica}")
    return str(found[-1]) if found else None


def write_checkpoint(
    directory: str | os.PathLike[str], replica: int, state: dict[str, Any], *, round: int, step: int, keep: int = 2
) -> Path:
    """Write `state` durably and drop all but the last `keep` files of this replica."""
    folder = Path(directory) / f"replica-{replica}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"round-{round:06d}-step-{step:09d}.ckpt"
    draft = folder / f".{path.name}.{os.getpid()}"
    try:
        with draft.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    _sync_folder(folder)
    for old in _complete(folder)[:-keep]:
        old.unlink(missing_ok=True)
    return path


def _complete(folder: Path) -> list[Path]:
    """Complete files, oldest first: by step, for a step can't be trained twice in one run."""
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for match, path in sorted(found, key=lambda item: (int(item[0][2]), int(item[0][1])))]


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


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
        elif not re.search(rf"(?<!\d){identity.replica}(?!\d)", str(callback.dirpath)):
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
