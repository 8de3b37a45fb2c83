"""What Composer's state says of the steps ahead: budget, schedules, time.

Composer's own schedulers are functions of `state.timestamp`. They are stepped before the timestamp moves, so that the
rate lags one batch; and of several, the last one wins. Driving copies over the timestamps to come gives just that.

Invariant: looking ahead leaves the state as it is; only `forward` moves it.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from typing import Any

from composer.core import State, Timestamp, TimeUnit
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

__all__ = ["Ahead", "default_every_batch", "forward", "is_final_batch", "remaining_batches", "ticks", "why_constant"]


def default_every_batch(schedulers: Sequence[Any]) -> bool:
    """Whether a Trainer that wasn't told steps its schedulers with every batch: not if one of torch's is among them."""
    return all(_is_composers(one) for one in schedulers)


def _is_composers(scheduler: Any) -> bool:
    return isinstance(scheduler, LambdaLR) and all(
        getattr(one, "__qualname__", "").startswith("compile_composer_scheduler.") for one in scheduler.lr_lambdas
    )


def ticks(schedulers: Sequence[Any]) -> list[Any]:
    """How often each was stepped, as far as it tells."""
    # A chain keeps no count of its own.
    counting = [one if hasattr(one, "last_epoch") else getattr(one, "_schedulers", [one])[0] for one in schedulers]
    return [getattr(one, "last_epoch", None) for one in counting]


def why_constant(state: State, every_batch: bool) -> str:
    """Why the rates ahead can't be told; "" if they can."""
    for one in state.schedulers:
        if isinstance(one, ReduceLROnPlateau):
            return f"{type(one).__name__} waits for a metric"
        if not every_batch and state.dataloader_len is None:
            return f"{type(one).__name__} steps once an epoch and the length of an epoch is not known"
    return ""


class Ahead:
    """All schedulers of a state as one: `step()` is what the Trainer does with them in one batch.

    Made to be deep-copied by `preview_rates`, which puts a stand-in in the place of the optimizer. The copy begins
    where the state stands, and goes on by batches of average size.
    """

    def __init__(self, state: State, *, every_batch: bool) -> None:
        self.state, self.every_batch = state, every_batch
        self._schedulers: Sequence[Any] = state.schedulers
        self._time: Timestamp = state.timestamp

    def __deepcopy__(self, memo: dict[int, Any]) -> Ahead:
        other = Ahead(self.state, every_batch=self.every_batch)
        other._schedulers = [copy.deepcopy(one, memo) for one in self.state.schedulers]
        other._end_epoch()  # what the Trainer has still to do after an epoch's last batch
        return other

    def step(self) -> None:
        if self.every_batch:
            self._step()
        samples, tokens = average_batch(self.state)
        self._time = self._time.to_next_batch(samples=samples, tokens=tokens)
        self._end_epoch()

    def _end_epoch(self) -> None:
        length = self.state.dataloader_len
        if length is not None and self._time.batch_in_epoch.value >= length.value > 0:
            if not self.every_batch:
                self._step()
            self._time = self._time.to_next_epoch()

    def _step(self) -> None:
        present = self.state.timestamp
        self.state.timestamp = self._time
        try:
            for one in self._schedulers:
                one.step()
        finally:
            self.state.timestamp = present


def average_batch(state: State) -> tuple[int, int]:
    """(samples, tokens) of an average batch so far; before the first, what the loader says of its size."""
    now = state.timestamp
    if now.batch.value:
        return round(now.sample.value / now.batch.value), round(now.token.value / now.batch.value)
    return int(getattr(state.dataloader, "batch_size", None) or 0), 0


def remaining_batches(state: State, skipped: int) -> int | None:
    """Batches left before `max_duration`; None if that can't be told.

    `skipped` steps that `forward` moved the time by are in every unit but epochs already.
    """
    limit, now = state.max_duration, state.timestamp
    if limit is None:
        return None
    if limit.unit == TimeUnit.EPOCH:
        if state.dataloader_len is None:
            return None
        length = int(state.dataloader_len)
        return max(math.ceil(limit.value * length) - now.epoch.value * length - now.batch_in_epoch.value - skipped, 0)
    left = limit.value - now.get(limit.unit).value
    if left <= 0:
        return 0
    if limit.unit == TimeUnit.BATCH:
        return int(left)
    samples, tokens = average_batch(state)
    size = {TimeUnit.SAMPLE: samples, TimeUnit.TOKEN: tokens}.get(limit.unit, 0)
    return math.ceil(left / size) if size else None


def is_final_batch(state: State) -> bool:
    """True at BATCH_END if no batch follows, as far as can be told before the epoch's last events."""
    limit, now = state.max_duration, state.timestamp
    assert limit is not None, "the Trainer doesn't start without"
    if limit.unit != TimeUnit.EPOCH:
        return now >= limit
    over = state.dataloader_len is not None and now.batch_in_epoch.value >= state.dataloader_len.value
    return now.epoch.value + int(over) >= limit.value


def forward(state: State, steps: int, *, every_batch: bool) -> None:
    """Move time and schedulers by `steps` batches that this replica didn't train.

    The counts within the epoch stay: they say where the loader stands, and a resume goes by them.
    """
    samples, tokens = average_batch(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that no optimizer step went before: that is the point
        for _ in range(steps):
            if every_batch:
                for one in state.schedulers:
                    one.step()
            now = state.timestamp
            state.timestamp = now.copy(batch=now.batch + 1, sample=now.sample + samples, token=now.token + tokens)
