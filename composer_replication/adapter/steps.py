"""Counts the optimizer steps that changed the weights, and the learning rate each of them used.

Invariant: a step that a gradient scaler skipped, or that had no gradient, is never counted; nothing waits for the
device until an interval may be complete. The trainer's own step count is not used: it counts skipped steps, and
adds up several optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from composer_replication.adapter.tokens import TokenCount
from composer_replication.preview import group_weights, mean_rate

__all__ = ["StepRecorder"]


class StepRecorder:
    """Hooks on the optimizers of one fit.

    `last` is (True, flag) if the batch that ended last took a step; the flag is 1 on the device if a fused optimizer
    left the weights alone all the same, and None if it can't have.

    Args:
        optimizers: the trainer's, unwrapped.
        primary: index of the one whose steps count.
        before_step: called before every step of any of them.
    """

    def __init__(self, optimizers: Sequence[Optimizer], primary: int, *, before_step: Callable[[], None]) -> None:
        self.optimizer = optimizers[primary]
        self.tokens = TokenCount()
        self._before_step = before_step
        self._steps: list[tuple[list[Any], Tensor | None]] = []
        self._weights: tuple[int, ...] = ()
        self._attempts = 0
        self._stepped = False
        self.last: tuple[bool, Tensor | None] = (False, None)
        self._taken: tuple[bool, Tensor | None] = (False, None)
        self._handles: list[Any] = [opt.register_step_pre_hook(self._before) for opt in optimizers]
        self._handles.append(self.optimizer.register_step_post_hook(self._after))
        self.weigh()

    def weigh(self) -> None:
        """Fix each parameter group's weight in the learning rate: its trainable elements (at an interval's start)."""
        self._weights = group_weights(self.optimizer)

    @property
    def possible(self) -> int:
        """Steps since the last `take`: as many as there can be, for some may turn out to have been skipped."""
        return len(self._steps)

    def attempted(self, optimizer: Any) -> None:
        """The trainer is about to step `optimizer`; a gradient scaler may still skip it."""
        if getattr(optimizer, "optimizer", optimizer) is self.optimizer:
            self._attempts += 1
            self._before_step()

    def end_batch(self) -> bool:
        """Forget the tokens of a window whose step was skipped; True if a step was taken or skipped in this batch."""
        self.last, self._taken = self._taken, (False, None)
        if self._attempts > 0:
            self.tokens.drop()
        stepped, self._attempts, self._stepped = self._stepped or self._attempts > 0, 0, False
        return stepped

    def take(self) -> list[float]:
        """The learning rates of the real steps since the last call. Waits for the device."""
        steps, self._steps = self._steps, []
        return [self._mean(rates) for rates, skipped in steps if skipped is None or not bool(skipped)]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, *_: Any) -> None:
        self._before_step()

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        self._attempts, self._stepped = max(self._attempts - 1, 0), True
        # With no gradient at all (a training step that returned None) optimizers leave everything as it is.
        if not any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            self.tokens.drop()
            return
        # Fused optimizers are stepped even when the scaler found an overflow, and told so on the device.
        found = getattr(optimizer, "found_inf", None)
        skipped = found.detach().clone().reshape(()) if isinstance(found, Tensor) else None
        # Read after the step, before any scheduler: a closure may set the rate, so that before the step is too early.
        rates = [lr.detach().clone() if isinstance(lr := g["lr"], Tensor) else lr for g in optimizer.param_groups]
        self._steps.append((rates, skipped))
        self._taken = (True, skipped)
        self.tokens.step(skipped)

    def _mean(self, rates: list[Any]) -> float:
        # A group that was added since (by a fine-tuning callback) weighs nothing until the next interval.
        weights = (*self._weights, *[0] * (len(rates) - len(self._weights)))
        return mean_rate([{"lr": rate} for rate in rates], weights)
