"""One run of one replica: the outer loop, driven by what a trainer does.

Invariant: the loop is told of a step only when it is known to have changed the weights, and a round is closed between
two batches, never inside an accumulation window.
"""

from __future__ import annotations

import json
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from composer_replication.adapter.data import check_seeds, equal_first_batches, fingerprint
from composer_replication.adapter.interval import Interval
from composer_replication.adapter.options import Options
from composer_replication.adapter.steps import StepRecorder
from composer_replication.autoloco.values import Preview
from composer_replication.collective.base import Collective
from composer_replication.diloco.loop import OuterLoop
from composer_replication.diloco.ranks.channel import Ranks
from composer_replication.diloco.ranks.loop import FollowingLoop, make_loop
from composer_replication.diloco.repair import repair_optimizer_state
from composer_replication.diloco.summary import FinalSummary, RoundSummary
from composer_replication.diloco.told import of_interval
from composer_replication.errors import FleetMismatch
from composer_replication.preview import RatePreview

__all__ = ["Closed", "Driver", "final_of"]

Closed = Callable[[RoundSummary, Mapping[str, float]], None]

_HEARTBEAT_SECONDS = 2.0


class Driver(ABC):
    """What both trainers do alike. A trainer's subclass answers the questions at the end of this class.

    Args:
        model: the trainer's module.
        optimizers: the trainer's, unwrapped; `primary` is the index of the one whose steps count.
        collective: that of this run; closed by `stop`.
        options: the adapter's arguments.
        closed: called after each round with its summary and metrics, with everything in place.
        data_seed: the seed that the data's shards are cut with, equal on all replicas that shuffle; None on one that
            doesn't, for example because it has nothing to train.
        ranks: the processes of this replica, if it is several: each has a driver, and they do everything together.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        primary: int,
        collective: Collective,
        options: Options,
        closed: Closed,
        *,
        data_seed: int | None,
        ranks: Ranks | None = None,
    ) -> None:
        self.options, self._closed, self.collective, self.ranks = options, closed, collective, ranks
        self._optimizers = optimizers
        self.loop: OuterLoop | FollowingLoop = make_loop(
            model,
            collective,
            ranks,
            policy=options.policy,
            outer=options.outer,
            outer_device=options.outer_device,
            buffers=options.buffers,
            weighting=options.weighting,
        )
        self._data_seed = data_seed
        self._compare_seeds = data_seed is not None
        self.steps = StepRecorder(optimizers, primary, before_step=self.loop.before_step)
        self._interval = Interval()
        self.said: list[str] = []
        self.skipped = 0  # inner steps of the fleet that this replica never took
        self.exact_rates = True
        self._tokens: int | None = 0  # of the present interval
        self._fleet_tokens: tuple[int, int] | None = (0, 0)  # all rounds so far, and their tokens, if none was missed
        self._first_batch: float | None = None
        self._look_at_first_batch = options.identity.replicas > 1
        self._counting = True
        self._beat = time.monotonic()
        self._shown: dict[str, float] = {}

    # -- beginning -----------------------------------------------------------------------------------------------

    def start(self, saved: Mapping[str, Any] | None) -> None:
        """Join the fleet, or come back to it. `saved` is what `state_dict` gave."""
        if saved is not None:
            saved = own_part(saved, self.ranks)
            self.loop.load_state_dict(saved["loop"])
            self.skipped, self._counting = saved["skipped"], saved["counting"]
            self._fleet_tokens = saved.get("fleet_tokens")  # older checkpoints have none
            self._tokens = saved["loop"]["interval"]["tokens"]
            self._look_at_first_batch = False
        self.check_data(resumed=saved is not None)
        joined = self.loop.start(self.preview())
        self._forward(joined.fast_forward)
        self._interval.reset()
        if saved is not None:
            self._interval.restore(saved["loss"])
            self.steps.tokens.restore(saved["tokens"])
            self.restore(saved)
            if self.loop.due or self.loop.overtaken:  # it was stopped while it waited for the others
                self._close()
            if self.loop.left:  # it was stopped while it followed the others to the end
                self.stop_training()
        if self.loop.ended:
            self.stop_training()
            if saved is None:
                self.say(
                    f"the run has finished, {self.loop.round} rounds, {self.loop.position} steps: nothing is trained "
                    "here, and the model gets the run's final weights (another run needs another place or run name)"
                )
        self.publish("training")

    def say(self, message: str) -> None:
        self.said.append(message)
        if self.ranks is None or self.ranks.leads:
            # No line of ours tells the user more than the message does.
            warnings.warn_explicit(message, UserWarning, "composer_replication", 1)

    # -- batches -------------------------------------------------------------------------------------------------

    def look_at(self, batch: Any) -> None:
        """Remember what the first batch of a run held, for the others to compare."""
        if self._look_at_first_batch:
            self._look_at_first_batch = False
            self._first_batch = fingerprint(batch)

    def stop_counting(self, batch: Any) -> None:
        """A batch told nothing of its tokens: horizons are steps from now on. Raises ValueError if they're needed."""
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
            self.say(
                f"tokens aren't counted, so horizons are taken as steps: a batch has neither attention_mask nor "
                f"input_ids ({has}); give token_fn= to count them"
            )

    def after_batch(self, loss: float | Tensor | None, *, stepped: bool) -> FinalSummary | None:
        """Close the round if the batch just done completes the interval; leave if nothing comes after it.

        `stepped` is what `steps.end_batch()` said of the batch.
        """
        self._interval.batch(loss)
        if self.ranks is not None and self.loop.watch():
            self.told_to_stop()
        if self.loop.steps + self.steps.possible >= self.loop.plan.steps:
            self.count()
        if self.is_final_batch():
            return self.leave()
        if stepped and self.remaining() == 0:  # the fleet's steps that it never took count, too
            self.stop_training()
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

    def preview(self) -> Preview:
        taken = self.look_ahead()
        self.exact_rates = taken.mode == "exact"
        return taken.preview

    def _close(self, *, leaving: bool = False) -> None:
        self.count()
        self.publish("waiting")
        told = self._interval.metrics(self._tokens)
        if self._first_batch is not None:
            told["first_batch"] = self._first_batch
        if self._data_seed is not None:
            told["data_seed"] = float(self._data_seed % 2**53)  # exact in a float
        summary = self.loop.close_interval(self.preview(), leaving=leaving, metrics=told)
        self._forward(summary.fast_forward)
        if summary.restored:
            for optimizer in self._optimizers:
                repair_optimizer_state(optimizer)
            self.say(f"round {summary.round}: this replica's weights weren't finite; it goes on from the fleet's")
        if self._compare_seeds and summary.included:
            self._compare_seeds = False
            check_seeds(self.options.identity.replica, summary.member_metrics)
        if self._first_batch is not None:
            self._compare_first_batches(summary, self._first_batch)
            self._first_batch = None
        own = summary.member_metrics.get(self.options.identity.replica, told)
        metrics = {f"autoloco/{name}": value for name, value in of_interval(own).items()}
        metrics |= {**summary.metrics(), "autoloco/rates_exact": float(self.exact_rates)}
        if (tokens := self._tokens_up_to(summary)) is not None:
            metrics["autoloco/tokens"] = float(tokens)
        self._shown = {name: told[name] for name in ("loss", "tokens_per_second") if name in told}
        self._shown["wait_seconds"] = summary.wait_seconds
        self._interval.reset()
        self._tokens = 0
        self.steps.weigh()
        if summary.ended and not leaving:
            self.stop_training()
        self._closed(summary, metrics)
        self.publish("training")

    def _tokens_up_to(self, summary: RoundSummary) -> int | None:
        """Of the whole fleet since the run began; None to a replica that hasn't seen every round of it."""
        before = self._fleet_tokens
        if before is None or summary.tokens is None or summary.round != before[0]:
            self._fleet_tokens = None
            return None
        self._fleet_tokens = (before[0] + 1, before[1] + summary.tokens)
        return self._fleet_tokens[1]

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
            self.forward_schedulers(steps if left is None else min(steps, left))
            self.skipped += steps

    def _compare_first_batches(self, summary: RoundSummary, own: float) -> None:
        if self.ranks is not None and len(set(batches := self.ranks.collect(own))) < self.ranks.size:
            same_ranks = [rank for rank, batch in enumerate(batches) if batches.count(batch) > 1]
            self.say(f"ranks {same_ranks} of this replica began with the same batch ({self.why_same_data()})")
        same = equal_first_batches(self.options.identity.replica, summary.member_metrics)
        if same:
            self.say(
                f"replicas {same} began with the same batch as this one: they may all train on the same data "
                f"({self.why_same_data()})"
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
        """Tensors and primitives only. Called on all ranks of a replica together; rank 0's is the whole."""
        self.count()
        loop = self.loop.state_dict()
        own = {"loss": self._interval.state(), "tokens": self.steps.tokens.waiting(), **self.more_state()}
        state = {"loop": loop, "skipped": self.skipped, "counting": self._counting, **own}
        state["fleet_tokens"] = self._fleet_tokens
        if self.ranks is not None:
            state["ranks"] = self.ranks.gather(_on_cpu({**own, "interval_tokens": loop["interval"]["tokens"]}))
        return state

    def stop(self) -> None:
        """Take the hooks off and stop the heartbeat."""
        self.steps.remove()
        self.loop.close()

    # -- what the trainer tells ----------------------------------------------------------------------------------

    @abstractmethod
    def remaining(self) -> int | None:
        """Optimizer steps left in the budget, less those in `skipped`; None if it can't be told."""

    @abstractmethod
    def is_final_batch(self) -> bool:
        """True if no batch follows the present one, as far as can be told."""

    @abstractmethod
    def look_ahead(self) -> RatePreview:
        """The learning rates ahead on `loop.grid`, within `remaining()`."""

    @abstractmethod
    def forward_schedulers(self, steps: int) -> None:
        """Move the schedulers as far as `steps` optimizer steps would have."""

    @abstractmethod
    def stop_training(self) -> None:
        """No further batch."""

    @abstractmethod
    def told_to_stop(self) -> None:
        """Some rank of this replica was asked to stop (SIGTERM); called on all of them after the same batch."""

    @abstractmethod
    def why_same_data(self) -> str:
        """A likely reason why replicas see the same data, and what to do."""

    @abstractmethod
    def check_data(self, *, resumed: bool) -> None:
        """Say what is wrong with the training data, before the first batch."""

    def more_state(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the shared keys."""
        return {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Put `more_state()` back."""
        del saved


def _on_cpu(value: Any) -> Any:
    """For another process, which needn't have this one's device."""
    if isinstance(value, Mapping):
        return {key: _on_cpu(one) for key, one in value.items()}
    return value.detach().cpu() if isinstance(value, Tensor) else value


def own_part(saved: Mapping[str, Any], ranks: Ranks | None) -> Mapping[str, Any]:
    """What this process wrote into a replica's state. Raises FleetMismatch if there are more or fewer now."""
    parts = saved.get("ranks")
    then, now = len(parts) if parts else 1, 1 if ranks is None else ranks.size
    if then != now:
        raise FleetMismatch(
            f"the checkpoint is one of a replica of {then} processes, and this replica is {now}: start as many as then"
        )
    if ranks is None or parts is None:
        return saved
    own = parts[ranks.rank]
    interval = {**saved["loop"]["interval"], "tokens": own["interval_tokens"]}
    return {**saved, **own, "loop": {**saved["loop"], "interval": interval}}


def final_of(ended: Mapping[str, Any]) -> FinalSummary:
    """How a run ended, from the state of its outer loop after the end."""
    shared, totals = json.loads(ended["shared"]), ended["totals"]
    return FinalSummary(rounds=shared["round"], position=shared["position"], digest=ended["digest"], **totals)
