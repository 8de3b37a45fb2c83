"""One replica's own checkpoints: whole files, the last two, easy to find again.

Invariant: a file under its final name is complete and on disk; trainer state and outer state are in the same file, so
that no restart can pair newer data with older weights.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from composer_replication.diloco.ranks.channel import Ranks
from composer_replication.drafts import is_another

__all__ = ["latest_checkpoint", "names_replica", "write_checkpoint", "write_folder"]

_NAME = re.compile(r"(?:fit-(\d{3,})-)?round-(\d{6,})-step-(\d{9,})\.ckpt")
_DRAFT = re.compile(r"\..*\.ckpt\.(\d+)")


def latest_checkpoint(directory: str | os.PathLike[str], replica: int) -> str | None:
    """The newest complete checkpoint of `replica` under `directory`; None if there is none.

    For Lightning's `fit(ckpt_path=...)`, or Composer's `Trainer(load_path=...)`.
    """
    found = _complete(Path(directory) / f"replica-{replica}")
    return str(found[-1]) if found else None


def names_replica(path: str, replica: int) -> bool:
    """Is the replica's number in the last three names of a path? Further up it says nothing about replicas."""
    return re.search(rf"(?<!\d){replica}(?!\d)", "/".join(Path(path).parts[-3:])) is not None


def write_checkpoint(
    directory: str | os.PathLike[str],
    replica: int,
    state: dict[str, Any],
    *,
    round: int,
    step: int,
    fit: int = 0,
    keep: int = 2,
) -> Path:
    """Write `state` durably and drop all but the last `keep` files of this replica.

    `fit` is the number of the adapter's fit, from 0: rounds begin at 0 again with each.
    """
    path, draft = _paths(directory, replica, round=round, step=step, fit=fit)
    try:
        with draft.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if path.is_dir():
            _remove(path)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    _settle(path, keep)
    return path


def write_folder(
    directory: str | os.PathLike[str],
    replica: int,
    ranks: Ranks,
    save: Callable[[str], None],
    *,
    round: int,
    step: int,
    fit: int = 0,
    keep: int = 2,
) -> None:
    """The same for a checkpoint of several files: all ranks call `save` with one path, and make a folder of it.

    They share a disk, as for any sharded checkpoint.
    """
    where: list[Path] = []
    ranks.on_first(lambda: where.extend(_paths(directory, replica, round=round, step=step, fit=fit)))
    draft = ranks.collect(str(where[1]) if where else None)[0]
    save(draft)
    ranks.collect(None)  # everybody's shard is there

    def settle() -> None:
        path, folder = where
        for file in folder.rglob("*"):
            if file.is_file():
                with file.open("rb+") as handle:
                    os.fsync(handle.fileno())
        _sync_folder(folder)
        _remove(path)
        os.replace(folder, path)
        _settle(path, keep)

    ranks.on_first(settle)


def _paths(directory: str | os.PathLike[str], replica: int, *, round: int, step: int, fit: int) -> tuple[Path, Path]:
    """Where a checkpoint goes, and where it is written first."""
    folder = Path(directory) / f"replica-{replica}"
    folder.mkdir(parents=True, exist_ok=True)
    _drop_abandoned(folder)
    path = folder / f"{f'fit-{fit + 1:03d}-' if fit else ''}round-{round:06d}-step-{step:09d}.ckpt"
    return path, folder / f".{path.name}.{os.getpid()}"


def _settle(path: Path, keep: int) -> None:
    """Make the new name durable, and drop what it makes superfluous."""
    _sync_folder(path.parent)
    for old in _complete(path.parent)[:-keep]:
        if old != path:
            _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _complete(folder: Path) -> list[Path]:
    """Complete files, oldest first: by fit and round, which only grow.

    The step decides within a round only: it begins at 0 again in a replica that comes back without its checkpoint.
    """
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    order = [(tuple(int(number or 1) for number in match.groups()), path) for match, path in found]
    return [path for _, path in sorted(order)]


def _drop_abandoned(folder: Path) -> None:
    """Remove the drafts of writers that died: as large as a checkpoint each, and of no use to anyone."""
    for path in folder.iterdir():
        match = _DRAFT.fullmatch(path.name)
        if match and not is_another(int(match[1])):  # our own writes end before the next begins
            _remove(path)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
