"""One fit of one replica under Lightning.

Invariant: adds to the shared driver only what the Lightning Trainer alone can tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from composer_replication.adapter.data import shuffle_seed
from composer_replication.adapter.driver import Closed, Driver
from composer_replication.adapter.options import Options
from composer_replication.adapter.tokens import count_tokens
from composer_replication.collective.base import Collective
from composer_replication.diloco.ranks.channel import Ranks
from composer_replication.diloco.summary import FinalSummary
from composer_replication.lightning import rates, state
from composer_replication.lightning.data import forgets_its_place, unsharded_reasons
from composer_replication.lightning.strategy import Replica
from composer_replication.preview import RatePreview

__all__ = ["Fit"]


class Fit(Driver):
    """See the module's docstring, and `Driver`."""

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        collective: Collective,
        options: Options,
        closed: Closed,
        ranks: Ranks | None = None,
    ) -> None:
        self.trainer, self.module = trainer, module
        primary = _primary(trainer, options.optimizer)
        seed = shuffle_seed(self._loaders())
        super().__init__(module, trainer.optimizers, primary, collective, options, closed, data_seed=seed, ranks=ranks)
        self._previewer = rates.make_previewer(trainer, module, self.steps.optimizer)

    def _loaders(self) -> list[Any]:
        combined = self.trainer.fit_loop._combined_loader
        return list(combined.flattened) if combined is not None else []

    def _unsharded_reasons(self) -> list[str]:
        place = (self.trainer.global_rank, self.trainer.world_size) if self.ranks is not None else (0, 1)
        return unsharded_reasons(self._loaders(), self.options.identity, place)

    def check_data(self, *, resumed: bool) -> None:
        if isinstance(self.trainer.strategy, Replica):
            for reason in self._unsharded_reasons():
                self.say(f"replicas may train on the same samples: a training loader isn't sharded; {reason}")
        if resumed and forgets_its_place(self.trainer, self._loaders()):
            self.say(
                "this resumes in the middle of an epoch, and the training loader can't say where it was: the epoch's "
                "first samples will be seen again; a loader with state_dict and load_state_dict resumes exactly"
            )

    def start(self, saved: Mapping[str, Any] | None) -> None:
        super().start(saved)
        if saved is None and self.loop.round > 0 and not self.loop.ended:
            self.say(
                f"no checkpoint of its own: joined the fleet at round {self.loop.round}; its optimizer starts anew "
                "(set checkpoint_dir, and fit(ckpt_path=latest_checkpoint(...)), to resume exactly)"
            )

    def batch_begins(self, batch: Any) -> None:
        self.look_at(batch)
        count = None
        if self._counting:
            count = count_tokens(batch, pad_token_id=self.options.pad_token_id, token_fn=self.options.token_fn)
            if count is None:
                self.stop_counting(batch)
        self.steps.tokens.batch(count)

    def batch_ends(self, outputs: Any) -> FinalSummary | None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and self.module.automatic_optimization:
            loss = loss * self.trainer.accumulate_grad_batches  # which Lightning has divided it by
        return self.after_batch(loss if isinstance(loss, Tensor) else None, stepped=self.steps.end_batch())

    def remaining(self) -> int | None:
        return rates.remaining_steps(self.trainer, self.module, skipped=self.skipped)

    def is_final_batch(self) -> bool:
        return rates.is_final_batch(self.trainer)

    def look_ahead(self) -> RatePreview:
        return self._previewer.take(rates.loop_position(self.trainer), grid=self.loop.grid, remaining=self.remaining())

    def forward_schedulers(self, steps: int) -> None:
        rates.forward_schedulers(self.trainer, self.module, steps)

    def stop_training(self) -> None:
        self.trainer.should_stop = True

    def told_to_stop(self) -> None:
        self.trainer._signal_connector.received_sigterm = True

    def why_same_data(self) -> str:
        reasons = self._unsharded_reasons()
        why = reasons[0] if reasons else "its sampler may ignore the replica's rank"
        if not isinstance(self.trainer.strategy, Replica):
            why += "; strategy='local_replica' shards it"
        return why

    def more_state(self) -> dict[str, Any]:
        return {
            "gradients": state.accumulated_gradients(self.trainer, self.module),
            "random": state.random_state(self.module.device),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        state.restore_gradients(self.module, saved["gradients"])
        state.restore_random_state(saved["random"], self.module.device)


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
