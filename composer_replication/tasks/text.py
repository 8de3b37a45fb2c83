"""Text as bytes, cut into windows: the Python standard library's own source, or the files of any folder.

Invariant: the bytes are a pure function of the files and the settings. Order, cap and the split between training and
validation follow from hashes of the relative paths, so that equal folders give equal data on every machine.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from composer_replication.tasks.sizes import check_sizes

__all__ = ["Windows", "ResumableLoader", "TextData", "text_bytes"]

# Installed packages aren't the standard library; tests and tables of characters would crowd out prose and code.
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}
_VALIDATION_FILE_BYTES = 8192  # of one file at most, so that validation is a sample of many


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of `context` bytes or tokens that don't overlap, each with those that follow as labels.

    Item i is `{"input_ids": int64 (context,), "labels": int64 (context,)}`. All are full: what is left at the end is in
    none, so that nothing is padded.
    """

    def __init__(self, data: Tensor, context: int):
        assert not data.is_floating_point() and data.dim() == 1
        self.data = data
        self.context = context

    def __len__(self) -> int:
        return max(0, (len(self.data) - 1) // self.context)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        window = self.data[index * self.context : (index + 1) * self.context + 1].to(torch.int64)
        return {"input_ids": window[:-1], "labels": window[1:]}


class ResumableLoader(DataLoader[dict[str, Tensor]]):
    """A DataLoader that a checkpoint can put back to where it was in its epoch.

    The order itself must be a function of the epoch, as a distributed sampler's is.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._taken = 0  # batches handed out in the present epoch
        self._skipped = 0  # batches of the next epoch to pass over

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # type: ignore[override]  # torch's is a class of its own
        self._taken, self._skipped = self._skipped, 0
        return self._batches(self._taken)

    def _batches(self, first: int) -> Iterator[dict[str, Tensor]]:
        for index, batch in enumerate(super().__iter__()):
            if index >= first:
                self._taken = index + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        # After the last batch the next one is the first of a new epoch.
        return {"batches": self._taken % max(1, len(self))}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._skipped = state["batches"]


D = TypeVar("D", bound="Dataset[dict[str, Tensor]]")
Collate = Callable[[Sequence["dict[str, Tensor]"]], "dict[str, Tensor]"]


@dataclass(frozen=True, kw_only=True)
class TextData(Generic[D]):
    """Training and validation windows, or examples of different lengths, and the size of a batch."""

    train: D
    validation: D
    batch_size: int
    workers: int = 0
    collate: Collate | None = None  # puts a batch together; None: stacks what has one length
    validation_batch_size: int | None = None  # None: batch_size

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        # Trainers put a distributed sampler in the place of this shuffle, so that replicas see disjoint windows.
        return ResumableLoader(
            self.train,
            batch_size=self.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=self.workers,
            collate_fn=self.collate,
        )

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        size = self.validation_batch_size or self.batch_size
        return DataLoader(self.validation, batch_size=size, num_workers=self.workers, collate_fn=self.collate)


def text_bytes(
    *,
    path: str | None = None,
    pattern: str = "**/*.py",
    context: int = 128,
    batch_size: int = 16,
    max_bytes: int = 8_000_000,
    validation_bytes: int = 128_000,
    workers: int = 0,
) -> TextData[Windows]:
    """Read files into training and validation windows.

    Args:
        path: a folder (searched with `pattern`) or one file; None for the Python standard library's source.
        context: bytes in a window; no more than the model's context.
        max_bytes: stop reading training files here. A cap, not a demand: a smaller folder is fine.
        validation_bytes: the same for validation, cut from about one file in sixteen (of a single file, its end).

    Raises ValueError when a setting is out of range or when there is too little text for one batch.
    """
    check_sizes(context=context, batch_size=batch_size, max_bytes=max_bytes, validation_bytes=validation_bytes)
    root = Path(path).expanduser() if path is not None else Path(sysconfig.get_paths()["stdlib"])
    if root.is_file():
        whole = root.read_bytes()[: max_bytes + validation_bytes]
        cut = len(whole) - min(validation_bytes, len(whole) // 16)
        train, validation = whole[:cut], whole[cut:]
    else:
        train, validation = _read_folder(root, pattern, max_bytes, validation_bytes)
    data = TextData(
        train=Windows(_tensor(train), context),
        validation=Windows(_tensor(validation), context),
        batch_size=batch_size,
        workers=workers,
    )
    for name, windows in {"training": data.train, "validation": data.validation}.items():
        if len(windows) < (batch_size if name == "training" else 1):
            raise ValueError(
                f"{root} with the pattern {pattern!r} gives {len(windows)} {name} windows of {context} bytes: "
                "too few for a batch"
            )
    return data


def _read_folder(root: Path, pattern: str, max_bytes: int, validation_bytes: int) -> tuple[bytes, bytes]:
    if not root.is_dir():
        raise ValueError(f"there is no folder or file {root}")
    train, validation = bytearray(), bytearray()
    for rank, file in _ordered(root, pattern):
        if rank % 16 == 0:
            validation += file.read_bytes()[: min(_VALIDATION_FILE_BYTES, validation_bytes - len(validation))]
        elif len(train) < max_bytes:
            train += file.read_bytes()[: max_bytes - len(train)]
        if len(train) >= max_bytes and len(validation) >= validation_bytes:
            break
    return bytes(train), bytes(validation)


def _ordered(root: Path, pattern: str) -> Iterator[tuple[int, Path]]:
    """Files in the order of a hash of their path: a shuffle that is the same everywhere. Yields (hash, file)."""
    found: list[tuple[int, str, Path]] = []
    for file in root.glob(pattern):
        relative = file.relative_to(root)
        if file.is_file() and not _SKIPPED.intersection(relative.parts):
            name = relative.as_posix()
            found.append((int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"), name, file))
    for rank, _, file in sorted(found, key=lambda entry: entry[:2]):
        yield rank, file


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
