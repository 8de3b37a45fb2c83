"""One fit of one replica under Composer.

Invariant: adds to the shared driver only what Composer's State alone can tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from composer.core import State
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from composer_replication.adapter.data import shuffle_seed
from composer_replication.adapter.driver import Closed, Driver
from composer_replication.adapter.options import Options
from composer_replication.adapter.tokens import count_tokens
from composer_replication.collective.base import Collective
from composer_replication.composer import rates
from composer_replication.composer.data import unsharded_reason
from composer_replication.diloco.ranks.channel import Ranks
from composer_replication.diloco.summary import FinalSummary
from composer_replication.preview import LoopPosition, Previewer, RatePreview, Scheduled

__all__ = ["Fit", "count_batch"]


class Fit(Driver):
    """See the module's docstring, and `Driver`.

    `every_batch` is the Trainer's step_schedulers_every_batch, which the State doesn't tell; None: its default.
    """

    def __init__(
        self,
        state: State,
        collective: Collective,
        options: Options,
        closed: Closed,
        *,
        every_batch: bool | None,
        ranks: Ranks | None = None,
    ) -> None:
        self.state = state
        if not state.optimizers:
            raise ValueError("the Trainer has no optimizer: no step can be counted")
        seed = shuffle_seed([state.dataloader])
        # Composer wraps the model of a replica of several ranks; its names are the plain model's everywhere.
        model = state.model.module if isinstance(state.model, DistributedDataParallel) else state.model
        super().__init__(model, state.optimizers, 0, collective, options, closed, data_seed=seed, ranks=ranks)
        self._every_batch = rates.default_every_batch(state.schedulers) if every_batch is None else every_batch
        self._ticks: list[Any] | None = None
        self._previewer = self._make_previewer()

    def _make_previewer(self) -> Previewer:
        ahead = rates.Ahead(self.state, every_batch=self._every_batch)
        return Previewer(
            self.steps.optimizer,
            [Scheduled(scheduler=ahead)] if self.state.schedulers else [],
            pinned=(self.state, self.state.model),
            constant_because=rates.why_constant(self.state, self._every_batch),
        )

    def start(self, saved: Mapping[str, Any] | None) -> None:
        super().start(saved)
        if saved is None and self.loop.round > 0 and not self.loop.ended:
            self.say(
                f"no checkpoint of its own: joined the fleet at round {self.loop.round}; its optimizer starts anew "
                "(use autoresume, or checkpoint_dir and Trainer(load_path=latest_checkpoint(...)), to resume exactly)"
            )

    # -- events --------------------------------------------------------------------------------------------------

    def batch_begins(self) -> None:
        self.look_at(self.state.batch)
        if self._ticks is None:
            self._ticks = rates.ticks(self.state.schedulers)

    def gradients_ready(self) -> None:
        self.steps.attempted(self.steps.optimizer)

    def batch_ends(self) -> FinalSummary | None:
        self._check_frequency()
        stepped = self.steps.end_batch()
        took, skipped = self.steps.last
        if took:
            # Only now does the timestamp hold what the DataSpec counted.
            self.steps.tokens.batch(self._count())
            self.steps.tokens.step(skipped)
        losses = self.state.total_loss_dict or {}
        return self.after_batch(losses.get("loss/train/total"), stepped=stepped)

    def _count(self) -> int | Tensor | None:
        if not self._counting:
            return None
        before, now = self.state.previous_timestamp, self.state.timestamp
        told = now.token.value - before.token.value if before is not None else 0
        count = self._count_of_mine(told)
        if count is None:
            self.stop_counting(self.state.batch)
        return count

    def _count_of_mine(self, told: int) -> Any:
        batch, ranks = self.state.batch, self.ranks
        if ranks is None or self.options.token_fn is not None:
            return count_batch(batch, told, self.options)
        # Composer's count is of all ranks together: rank 0 gives it, where no mask tells each rank its own.
        if told and not (isinstance(batch, Mapping) and "attention_mask" in batch):
            return told if ranks.leads else 0
        return count_batch(batch, 0, self.options)

    def _check_frequency(self) -> None:
        """The first batch shows how often the Trainer steps its schedulers."""
        before, self._ticks = self._ticks, []
        if not before or all(one is None for one in before):
            return
        found = rates.ticks(self.state.schedulers) != before
        if found != self._every_batch:
            self._every_batch = found
            self._previewer = self._make_previewer()
            self.say(
                f"the Trainer steps its schedulers {'with every batch' if found else 'once an epoch'}: give AutoLoCo "
                f"step_schedulers_every_batch={found} too, for the first interval's preview assumed the other"
            )

    # -- what the driver asks ------------------------------------------------------------------------------------

    def check_data(self, *, resumed: bool) -> None:
        reason = unsharded_reason(self.state.dataloader, self.options.identity)
        if reason is not None:
            self.say(f"replicas may train on the same samples: the training loader isn't sharded; {reason}")

    def remaining(self) -> int | None:
        return rates.remaining_batches(self.state, self.skipped)

    def is_final_batch(self) -> bool:
        return rates.is_final_batch(self.state)

    def look_ahead(self) -> RatePreview:
        return self._previewer.take(LoopPosition(), grid=self.loop.grid, remaining=self.remaining())

    def forward_schedulers(self, steps: int) -> None:
        rates.forward(self.state, steps, every_batch=self._every_batch)

    def stop_training(self) -> None:
        self.state.stop_training()

    def told_to_stop(self) -> None:
        """Composer's handler ends the process that was told, and with it the others of its replica."""

    def why_same_data(self) -> str:
        reason = unsharded_reason(self.state.dataloader, self.options.identity)
        return reason or "use composer_replication.composer.replica_sampler, or give each replica its own data"


def count_batch(batch: Any, told: int, options: Options) -> Any:
    """Non-padding tokens of a batch, of which the Trainer's DataSpec told `told` (0: it doesn't know).

    `token_fn` decides if there is one. A DataSpec that told fewer than batch x length leaves padding out already, and
    is believed; else the batch is looked at as under Lightning (`count_tokens`), and the DataSpec is believed last.
    """
    if options.token_fn is not None:
        return options.token_fn(batch)
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if isinstance(ids, torch.Tensor) and 0 < told < ids.numel():
        return told
    count = count_tokens(batch, pad_token_id=options.pad_token_id)
    return count if count is not None else told or None
