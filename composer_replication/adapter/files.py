"""One replica's own checkpoints: whole files, the last two, easy to find again.

Invariant: a file under its final name is complete and on disk; trainer state and outer state are in the same file, so
that no restart can pair newer data with older weights.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

__all__ = ["latest_checkpoint", "write_checkpoint"]

_NAME = re.compile(r"round-(\d{6,})-step-(\d{9,})\.ckpt")


def latest_checkpoint(directory: str | os.PathLike[str], replica: int) -> str | None:
    """The newest complete checkpoint of `replica` under `directory`; None if there is none.

    For Lightning's `fit(ckpt_path=...)`, or Composer's `Trainer(load_path=...)`.
    """
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
