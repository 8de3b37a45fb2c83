"""One fit of one replica: the outer loop, driven by what the trainer does.

Invariant: the loop is told of a step only when it is known to have changed the weights, and a round is closed between
two batches, never inside an accumulation window.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch

from composer_replication.autoloco.config import OuterConfig
from composer_replication.autoloco.values import Policy, Preview
from composer_replication.collective.base import Collective
from composer_replication.diloco.loop import OuterLoop
from composer_replication.diloco.repair import repair_optimizer_state
from composer_replication.diloco.summary import FinalSummary, RoundSummary
from composer_replication.isolate import Identity
from composer_replication.lightning import rates, state
from composer_replication.lightning.data import (
    equal_first_batches,
    fingerprint,
    forgets_its_place,
    shuffle_seed,
    unsharded_reasons,
)
from composer_replication.lightning.report import Interval
from composer_replication.lightning.steps import StepRecorder
from composer_replication.lightning.strategy import LocalReplicaStrategy
from composer_replication.lightning.tokens import TokenFunction, count_tokens

__all__ = ["Fit", "FitOptions", "final_of"]

_HEARTBEAT_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """What a fit needs of the callback's arguments."""

    identity: Identity
    policy: Policy
    outer: OuterConfig
    outer_device: str | torch.device = "cpu"
    weighting: Literal["equal", "tokens"] = "equal"
    buffers: Literal["average", "local"] = "average"
    optimizer: int | None = None
    pad_token_id: int | None = None
    token_fn: TokenFunction | None = None


class Fit:
    """See the module's docstring. `closed(summary, metrics)` is called after each round, with everything in place."""

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        collective: Collective,
        options: FitOptions,
        closed: Callable[[RoundSummary, Mapping[str, float]], None],
    ) -> None:
        self.trainer, self.module, self.options, self._closed = trainer, module, options, closed
        self.collective = collective
        primary = _primary(trainer, options.optimizer)
        self.loop = OuterLoop(
            module,
            collective,
            policy=options.policy,
            outer=options.outer,
            outer_device=options.outer_device,
            buffers=options.buffers,
            weighting=options.weighting,
            settings={"data_seed": shuffle_seed(self._loaders())},
        )
        self.steps = StepRecorder(trainer.optimizers, primary, before_step=self.loop.before_step)
        self._previewer = rates.make_previewer(trainer, module, self.steps.optimizer)
        self._interval = Interval()
        self.said: list[str] = []
        self.skipped = 0  # inner steps of the fleet that this replica never took
        self.exact_rates = True
        self._tokens: int | None = 0  # of the present interval
        self._first_batch: float | None = None
        self._look_at_first_batch = options.identity.replicas > 1
        self._counting = True
        self._beat = time.monotonic()
        self._shown: dict[str, float] = {}

    # -- beginning -----------------------------------------------------------------------------------------------

    def start(self, saved: Mapping[str, Any] | None) -> None:
        """Join the fleet, or come back to it. `saved` is what `state_dict` gave."""
        if saved is not None:
            self.loop.load_state_dict(saved["loop"])
            self.skipped, self._counting = saved["skipped"], saved["counting"]
            self._tokens = saved["loop"]["interval"]["tokens"]
            self._look_at_first_batch = False
        self._check_data(resumed=saved is not None)
        joined = self.loop.start(self.preview())
        self._forward(joined.fast_forward)
        self._interval.reset()
        if saved is not None:
            self._interval.restore(saved["loss"])
            self.steps.tokens.restore(saved["tokens"])
            state.restore_gradients(self.module, saved["gradients"])
            state.restore_random_state(saved["random"], self.module.device)
            if self.loop.due or self.loop.overtaken:  # it was stopped while it waited for the others
                self._close()
            if self.loop.left:  # it was stopped while it followed the others to the end
                self.trainer.should_stop = True
        self.publish("training")

    def _say(self, message: str) -> None:
        self.said.append(message)
        warnings.warn(message, stacklevel=3)

    def _loaders(self) -> list[Any]:
        combined = self.trainer.fit_loop._combined_loader
        return list(combined.flattened) if combined is not None else []

    def _check_data(self, *, resumed: bool) -> None:
        if isinstance(self.trainer.strategy, LocalReplicaStrategy):
            for reason in unsharded_reasons(self._loaders(), self.options.identity):
                self._say(f"replicas may train on the same samples: a training loader isn't sharded; {reason}")
        if resumed and forgets_its_place(self.trainer, self._loaders()):
            self._say(
                "this resumes in the middle of an epoch, and the training loader can't say where it was: the epoch's "
                "first samples will be seen again; a loader with state_dict and load_state_dict resumes exactly"
            )

    # -- batches -------------------------------------------------------------------------------------------------

    def batch_begins(self, batch: Any) -> None:
        if self._look_at_first_batch:
            self._look_at_first_batch = False
            self._first_batch = fingerprint(batch)
        if self._counting:
            count = count_tokens(batch, pad_token_id=self.options.pad_token_id, token_fn=self.options.token_fn)
            if count is None:
                self._stop_counting(batch)
            self.steps.tokens.batch(count)
        else:
            self.steps.tokens.batch(None)

    def _stop_counting(self, batch: Any) -> None:
        has = f"it is a {type(batch).__name__}" + (
            f" with {sorted(map(str, batch))}" if isinstance(batch, Mapping) else ""
        )
        if self.options.weighting == "tokens":
            raise ValueError(
                f"weighting='tokens' needs the tokens of each batch, but this one has neither attention_mask nor "
                f"input_ids ({has}): give token_fn=, or use weighting='equal'"
            )
        self._counting = False
        if self.options.policy.name == "autoloco":
            self._say(
                f"tokens aren't counted, so horizons are taken as steps: a batch has neither attention_mask nor "
                f"input_ids ({has}); give token_fn= to count them"
            )

    def batch_ends(self, outputs: Any) -> FinalSummary | None:
        """Count what the batch did; close the round if the interval is complete, leave if nothing comes after it."""
        self._interval.batch(outputs)
        stepped = self.steps.end_batch()
        if self.loop.steps + self.steps.possible >= self.loop.plan.steps:
            self.count()
        if rates.is_final_batch(self.trainer):
            return self.leave()
        if stepped and self.remaining() == 0:  # the fleet's steps that it never took count, too
            self.trainer.should_stop = True
            return self.leave()
        if stepped and (self.loop.due or self.loop.overtaken):
            self._close()
        elif time.monotonic() - self._beat > _HEARTBEAT_SECONDS:
            self.publish("training")
        return None

    def count(self) -> None:
        """Tell the loop of the steps since the last time. Waits for the device."""
        for rate in self.steps.take():
            self.loop.step_done(rate, tokens=0)
        tokens = self.steps.tokens.take()
        self.loop.add_tokens(tokens)
        self._tokens = None if tokens is None or self._tokens is None else self._tokens + tokens

    # -- rounds --------------------------------------------------------------------------------------------------

    def remaining(self) -> int | None:
        return rates.remaining_steps(self.trainer, self.module, skipped=self.skipped)

    def preview(self) -> Preview:
        taken = self._previewer.take(rates.loop_position(self.trainer), grid=self.loop.grid, remaining=self.remaining())
        self.exact_rates = taken.mode == "exact"
        return taken.preview

    def _close(self, *, leaving: bool = False) -> None:
        self.count()
        self.publish("waiting")
        told = self._interval.metrics(self._tokens)
        if self._first_batch is not None:
            told["first_batch"] = self._first_batch
        summary = self.loop.close_interval(self.preview(), leaving=leaving, metrics=told)
        self._forward(summary.fast_forward)
        if summary.restored:
            for optimizer in self.trainer.optimizers:
                repair_optimizer_state(optimizer)
            self._say(f"round {summary.round}: this replica's weights weren't finite; it goes on from the fleet's")
        if self._first_batch is not None:
            self._first_batch = None
            self._compare_first_batches(summary)
        own = summary.member_metrics.get(self.options.identity.replica, told)
        metrics = {f"autoloco/{name}": v for name, v in own.items() if name != "first_batch"}
        metrics |= {**summary.metrics(), "autoloco/rates_exact": float(self.exact_rates)}
        self._shown = {name: told[name] for name in ("loss", "tokens_per_second") if name in told}
        self._shown["wait_seconds"] = summary.wait_seconds
        self._interval.reset()
        self._tokens = 0
        self.steps.weigh()
        if summary.ended and not leaving:
            self.trainer.should_stop = True
        self._closed(summary, metrics)
        self.publish("training")

    def leave(self) -> FinalSummary:
        """Put in what is left of the interval, and follow the others to the end of the run."""
        while not self.loop.left and not self.loop.ended:
            self._close(leaving=True)
        self.publish("following")
        final = self.loop.finish(self.preview(), metrics=self._shown)
        self.publish("finished")
        return final

    def _forward(self, steps: int) -> None:
        if steps:
            left = self.remaining()
            rates.forward_schedulers(self.trainer, self.module, steps if left is None else min(steps, left))
            self.skipped += steps

    def _compare_first_batches(self, summary: RoundSummary) -> None:
        same = equal_first_batches(self.options.identity.replica, summary.member_metrics)
        if same:
            reasons = unsharded_reasons(self._loaders(), self.options.identity)
            why = reasons[0] if reasons else "its sampler may ignore the replica's rank"
            if not isinstance(self.trainer.strategy, LocalReplicaStrategy):
                why += "; strategy='local_replica' shards it"
            self._say(
                f"replicas {same} began with the same batch as this one: they may all train on the same data ({why})"
            )

    # -- for people and checkpoints ------------------------------------------------------------------------------

    def publish(self, what: str, **more: Any) -> None:
        self._beat = time.monotonic()
        started = self.loop.started
        self.collective.publish(
            {
                "state": what,
                "round": self.loop.round,
                "step": self.loop.position + self.loop.steps + self.steps.possible,
                "horizon": self.loop.plan.steps if started else None,
                **self._shown,
                **more,
            }
        )

    def state_dict(self) -> dict[str, Any]:
        self.count()
        return {
            "loop": self.loop.state_dict(),
            "skipped": self.skipped,
            "counting": self._counting,
            "loss": self._interval.state(),
            "tokens": self.steps.tokens.waiting(),
            "gradients": state.accumulated_gradients(self.trainer, self.module),
            "random": state.random_state(self.module.device),
        }

    def stop(self) -> None:
        """Take the hooks off and stop the heartbeat."""
        self.steps.remove()
        self.loop.close()


def final_of(ended: Mapping[str, Any]) -> FinalSummary:
    """How a run ended, from the state of its outer loop after the end."""
    shared, totals = json.loads(ended["shared"]), ended["totals"]
    return FinalSummary(rounds=shared["round"], position=shared["position"], digest=ended["digest"], **totals)


def _primary(trainer: pl.Trainer, named: int | None) -> int:
    count = len(trainer.optimizers)
    if not any(group["params"] for optimizer in trainer.optimizers for group in optimizer.param_groups):
        raise ValueError("the module has no optimizer: configure_optimizers gave none, so that no step can be counted")
    if named is None and count > 1:
        raise ValueError(
            f"the module has {count} optimizers: say whose steps count, with optimizer=0 to optimizer={count - 1}"
        )
    if named is not None and not 0 <= named < count:
        raise ValueError(f"optimizer must be between 0 and {count - 1}, got {named}")
    return named or 0
