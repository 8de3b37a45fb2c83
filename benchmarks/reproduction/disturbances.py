"""What happens to a fleet in the middle of a run, to see what the classifier is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from composer_replication.simulation import Disturbance

__all__ = ["DISTURBANCES", "DataShift", "RateSpike", "make"]


class RateSpike:
    """The learning rate is multiplied for some steps, and no schedule says so."""

    first, last, factor = 2000, 2040, 10.0

    def batch(self, replica: int, step: int, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return batch

    def rate(self, replica: int, step: int) -> float:
        return self.factor if self.first <= step < self.last else 1.0


class DataShift:
    """For some time each replica sees a narrow slice of the data, its own: what they learn points apart."""

    first, last, windows = 2000, 2400, 64

    def __init__(self, data: Any) -> None:
        self._train, self._size = data.train, data.batch_size

    def batch(self, replica: int, step: int, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if not self.first <= step < self.last:
            return batch
        begin = replica * self.windows
        within = [(step * self._size + i) % self.windows for i in range(self._size)]
        return default_collate([self._train[begin + i] for i in within])

    def rate(self, replica: int, step: int) -> float:
        return 1.0


DISTURBANCES = {"spike": lambda data: RateSpike(), "shift": DataShift}


def make(name: str | None, data: Any) -> Disturbance | None:
    return DISTURBANCES[name](data) if name else None
