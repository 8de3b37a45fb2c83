"""The learning rates that a torch optimizer will run with, read ahead of time (paper, appendix B.2).

Invariant: looking ahead changes nothing. A copy of the schedulers is driven over a stand-in for the optimizer;
the live optimizer, its schedulers, the parameters and the random-number generators stay as they are.

Exact for every scheduler that is a function of its own state. Not so, and then the present rate is
assumed to last (`mode` "constant"): a scheduler that waits for a metric, one stepped by hand, one per epoch
where the length of an epoch isn't known, or one that fails when it is copied. A schedule function that changes
variables outside of itself can't be copied, nor told from one that doesn't: it must be a pure function of the step.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from composer_replication.autoloco.values import Preview

__all__ = ["LoopPosition", "Previewer", "RatePreview", "Scheduled", "group_weights", "mean_rate", "preview_rates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """One scheduler and when the training loop steps it.

    `interval` "step": after an optimizer step, if the number of batches done in the epoch is a multiple of
    `frequency`. "epoch": after the last batch of an epoch, if the number of epochs done is such a multiple.
    """

    scheduler: Any
    interval: str = "step"
    frequency: int = 1

    def __post_init__(self) -> None:
        if self.interval not in ("step", "epoch"):
            raise ValueError(f"interval must be 'step' or 'epoch', not {self.interval!r}")
        if self.frequency < 1:
            raise ValueError(f"frequency must be at least 1, not {self.frequency!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPosition:
    """Where the training loop stands: everything that belongs to the last batch done has been stepped.

    The loop takes an optimizer step after every `accumulate` batches and after the last batch of an epoch.
    """

    batches_per_epoch: int | None = None  # None: not known, or no epochs
    accumulate: int = 1
    batch: int = 0  # batches done in this epoch
    epoch: int = 0  # epochs done

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, not {self.accumulate!r}")
        if self.batches_per_epoch is not None and self.batches_per_epoch < 1:
            raise ValueError(f"batches_per_epoch must be at least 1, not {self.batches_per_epoch!r}")
        if self.batch < 0 or self.epoch < 0:
            raise ValueError(f"batch and epoch must be at least 0, not {self.batch!r} and {self.epoch!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePreview:
    """A preview and how it was come by: mode "exact", or "constant" with the reason."""

    preview: Preview
    mode: str
    reason: str = ""


def group_weights(optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """Trainable elements of each parameter group."""
    return tuple(
        sum(parameter.numel() for parameter in group["params"] if parameter.requires_grad)
        for group in optimizer.param_groups
    )


def mean_rate(groups: Sequence[Mapping[str, Any]], weights: Sequence[int]) -> float:
    """The learning rate of all groups together: the mean, by elements (docs/method.md). Equal rates give just that."""
    rates = [float(group["lr"]) for group in groups]
    if len(rates) != len(weights):
        raise ValueError(f"weights must have one item for each of {len(rates)} parameter groups, not {len(weights)}")
    if all(rate == rates[0] for rate in rates):
        return rates[0]
    if not any(weights):
        weights = [1] * len(rates)
    return sum(weight * rate for weight, rate in zip(weights, rates, strict=True)) / sum(weights)


class _StandIn(torch.optim.Optimizer):
    """Parameter groups without parameters: all that a scheduler looks at."""

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:  # no super(): nothing to set up
        self.param_groups = groups
        self.defaults = defaults
        self.state = {}  # type: ignore[assignment]
        self._opt_called = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return None


def _stand_ins(
    optimizer: torch.optim.Optimizer, schedulers: Sequence[Scheduled], pinned: Iterable[Any]
) -> tuple[_StandIn, list[Scheduled]]:
    """Copies that share among themselves what the originals share, and nothing with them but what is pinned."""
    memo: dict[int, Any] = {id(one): one for one in pinned}
    for group in optimizer.param_groups:
        memo.update({id(parameter): parameter for parameter in group["params"]})
    groups = [
        {key: copy.deepcopy(value, memo) for key, value in group.items() if key != "params"} | {"params": []}
        for group in optimizer.param_groups
    ]
    stand_in = _StandIn(groups, dict(optimizer.defaults))
    memo[id(optimizer)] = stand_in
    copies = [
        Scheduled(scheduler=copy.deepcopy(one.scheduler, memo), interval=one.interval, frequency=one.frequency)
        for one in schedulers
    ]
    return stand_in, copies


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep warnings quiet and the random-number generators of Python and torch (CPU) where they are."""
    python_state, torch_state = random.getstate(), torch.random.get_rng_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(python_state)
        torch.random.set_rng_state(torch_state)


def _optimizer_steps(schedulers: Sequence[Scheduled], loop: LoopPosition) -> Iterator[None]:
    """Yields before each optimizer step; steps the schedulers after it as the training loop would."""
    batch, epoch, per_epoch = loop.batch, loop.epoch, loop.batches_per_epoch
    if per_epoch is not None and batch >= per_epoch:
        batch, epoch = 0, epoch + 1
    while True:
        batch += 1
        last = batch == per_epoch
        if batch % loop.accumulate == 0 or last:
            yield
            for one in schedulers:
                if one.interval == "step" and batch % one.frequency == 0:
                    one.scheduler.step()
        if last:
            for one in schedulers:
                if one.interval == "epoch" and (epoch + 1) % one.frequency == 0:
                    one.scheduler.step()
            batch, epoch = 0, epoch + 1


def _why_constant(schedulers: Sequence[Scheduled], loop: LoopPosition) -> str:
    for one in schedulers:
        name = type(one.scheduler).__name__
        if isinstance(one.scheduler, ReduceLROnPlateau):
            return f"{name} waits for a metric"
        if one.interval == "epoch" and loop.batches_per_epoch is None:
            return f"{name} steps once an epoch and the length of an epoch is not known"
    return ""


def preview_rates(
    optimizer: torch.optim.Optimizer,
    schedulers: Sequence[Scheduled],
    loop: LoopPosition,
    *,
    grid: Sequence[int],
    remaining: int | None = None,
    weights: Sequence[int] | None = None,
    pinned: Iterable[Any] = (),
    constant_because: str = "",
) -> RatePreview:
    """Sums of the next learning rates at the step counts of `grid` (ascending), and the next rate.

    `remaining` is the budget left in optimizer steps: nothing beyond it is counted. `weights` are those of
    `mean_rate`; None takes `group_weights(optimizer)`. `pinned` objects, such as the module whose method is a
    schedule function, are not copied. A non-empty `constant_because` says that the schedulers don't tell.
    """
    if not grid:
        raise ValueError("grid must hold at least one step count")
    if weights is None:
        weights = group_weights(optimizer)
    now = mean_rate(optimizer.param_groups, weights)
    wanted = grid[-1] if remaining is None else min(grid[-1], remaining)
    reason = constant_because or _why_constant(schedulers, loop)
    rates: list[float] = [] if wanted else [now]
    if not reason and wanted:
        try:
            with _undisturbed():
                stand_in, copies = _stand_ins(optimizer, schedulers, pinned)
                steps = _optimizer_steps(copies, loop)
                while len(rates) < wanted:
                    next(steps)
                    rates.append(mean_rate(stand_in.param_groups, weights))
        except Exception as error:  # a scheduler may raise anything; training goes on without a preview
            reason = f"looking {len(rates)} steps ahead failed: {type(error).__name__}: {error}"
    if not rates:
        rates.append(now)
    rates.extend(rates[-1:] * (wanted - len(rates)))

    sums: list[float] = []
    total, done = 0.0, 0
    for steps_ahead in grid:
        while done < min(steps_ahead, wanted):
            total += rates[done]
            done += 1
        sums.append(total)
    return RatePreview(
        preview=Preview(steps=tuple(grid), sums=tuple(sums), next_lr=rates[0], remaining=remaining),
        mode="constant" if reason else "exact",
        reason=reason,
    )


class Previewer:
    """`preview_rates` for one optimizer and its schedulers. The first fallback, and only that, is told to `tell`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedulers: Sequence[Scheduled],
        *,
        pinned: Iterable[Any] = (),
        constant_because: str = "",
        tell: Callable[[str], None] = warnings.warn,
    ) -> None:
        self.optimizer = optimizer
        self.schedulers = tuple(schedulers)
        self.pinned = tuple(pinned)
        self.constant_because = constant_because
        self._tell: Callable[[str], None] | None = tell

    def take(
        self,
        loop: LoopPosition,
        *,
        grid: Sequence[int],
        remaining: int | None = None,
        weights: Sequence[int] | None = None,
    ) -> RatePreview:
        """A preview from where the optimizer, its schedulers and the loop stand now."""
        taken = preview_rates(
            self.optimizer,
            self.schedulers,
            loop,
            grid=grid,
            remaining=remaining,
            weights=weights,
            pinned=self.pinned,
            constant_because=self.constant_because,
        )
        if taken.mode == "constant" and self._tell is not None:
            tell, self._tell = self._tell, None
            tell(
                f"The learning rates ahead can't be previewed ({taken.reason}); the present rate is assumed to last. "
                "Training is not affected, but the choice of intervals and the outer step's correction are less exact."
            )
        return taken
