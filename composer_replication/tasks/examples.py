"""Examples of tokens of different lengths, and batches of them padded to one.

Invariant: padding stands at the right, behind every token that is trained on, and is no label: a causal model's logits
there don't depend on it, so that models need no mask. The batch's `attention_mask` says what is padding, for counting.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from composer_replication.tasks.next_token import IGNORED

__all__ = ["Examples", "Padded", "example_of"]


def example_of(ids: Sequence[int], targets: Sequence[bool] | None = None) -> dict[str, Tensor]:
    """`{"input_ids": int64 (time,), "labels": int64 (time,)}` of one example's tokens.

    A label is the token that follows, where that one is a target (all are, unless `targets` says which); IGNORED
    elsewhere, and at the end, which nothing follows.
    """
    tokens = torch.tensor(ids, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORED)
    labels[:-1] = tokens[1:]
    if targets is not None:
        labels[:-1][~torch.tensor(targets, dtype=torch.bool)[1:]] = IGNORED
    return {"input_ids": tokens, "labels": labels}


class Padded:
    """Puts examples together: `input_ids`, `labels` and `attention_mask`, all int64 (batch, time).

    Args:
        token: what `input_ids` are filled up with.
        length: what to fill up to; None: the longest of the batch.
    """

    def __init__(self, token: int, length: int | None = None) -> None:
        self.token = token
        self.length = length

    def __call__(self, examples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        longest = max(len(one["input_ids"]) for one in examples) if self.length is None else self.length
        shape = (len(examples), longest)
        batch = {
            "input_ids": torch.full(shape, self.token, dtype=torch.int64),
            "labels": torch.full(shape, IGNORED, dtype=torch.int64),
            "attention_mask": torch.zeros(shape, dtype=torch.int64),
        }
        for row, one in enumerate(examples):
            length = len(one["input_ids"])
            batch["input_ids"][row, :length] = one["input_ids"]
            batch["labels"][row, :length] = one["labels"]
            batch["attention_mask"][row, :length] = 1
        return batch


class Examples(Dataset[dict[str, Tensor]]):
    """Examples in memory, five bytes a token. `found` are (ids, which of them are targets or None for all)."""

    def __init__(self, found: Iterable[tuple[Sequence[int], Sequence[bool] | None]]) -> None:
        ids, targets, ends = array("i"), bytearray(), [0]
        for tokens, marks in found:
            ids.extend(tokens)
            targets.extend(map(bool, marks) if marks is not None else b"\1" * len(tokens))
            ends.append(len(ids))
        self._ids = np.frombuffer(ids, dtype=np.int32) if ids else np.zeros(0, dtype=np.int32)
        self._targets = np.frombuffer(targets, dtype=np.bool_)
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = slice(self._ends[index], self._ends[index + 1])
        return example_of(self._ids[part].tolist(), self._targets[part].tolist())

    @property
    def tokens(self) -> int:
        return len(self._ids)

    @property
    def targets(self) -> int:
        """Labels in all examples: a first token is never one."""
        firsts = sum(bool(self._targets[first]) for first in self._ends[:-1])
        return int(np.count_nonzero(self._targets)) - firsts
