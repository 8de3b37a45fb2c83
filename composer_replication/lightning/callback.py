"""`AutoLoCoCallback`: runs the outer loop inside a Lightning Trainer.

Invariant: the round is closed before anything else looks at the weights of its last batch, so that validation and
checkpoints of that batch see what the whole fleet agreed on.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.optim import Optimizer
from typing_extensions import override

from composer_replication.adapter.options import read_options
from composer_replication.adapter.session import Session
from composer_replication.adapter.tokens import TokenFunction
from composer_replication.autoloco.values import Policy
from composer_replication.collective.base import Collective
from composer_replication.diloco.loop import OuterLoop
from composer_replication.diloco.ranks.channel import Ranks
from composer_replication.diloco.ranks.loop import FollowingLoop
from composer_replication.diloco.summary import FinalSummary, RoundSummary
from composer_replication.errors import Interrupted
from composer_replication.lightning.checkpoints import save_replica, separate_checkpoints
from composer_replication.lightning.fit import Fit
from composer_replication.lightning.report import log_round
from composer_replication.lightning.world import check_strategy, hear_sigterm

__all__ = ["AutoLoCoCallback"]

_PREEMPTED = 128 + signal.SIGTERM  # exit status of a process that was told to stop before its work was done


class AutoLoCoCallback(pl.Callback):
    """Trains alone, and takes one outer step with the other replicas at the end of each interval.

    Args:
        store: URI of the place where the replicas meet ("file:///shared/run1"), or an open store. Left out:
            COMPOSER_REPLICATION_STORE.
        replica, replicas: this process's id, from 0, and how many there are. Left out: from
            COMPOSER_REPLICATION_REPLICA and _REPLICAS, or from `launcher`'s variables.
        launcher: "torchrun", "slurm", ..., if each of its processes is one replica (`composer_replication.isolate`).
        collective: instead of a store: a ready collective, or a function that gives one for the n-th fit.
        control: a second store (URI or open) for all but the blobs, where `store` can't create an object only once.
        run: name of the run inside the store.
        policy: "autoloco", "fixed" (DiLoCo), "qsr", "linear", "staircase", or a policy.
        base_horizon: optimizer steps in the base interval.
        min_horizon, max_horizon, horizon_step: bounds and spacing of the horizons; None: half, one and a half, a tenth.
        warmup_steps: inner learning-rate warm-up, during which the horizon stays.
        outer_lr, outer_momentum, normalize: outer optimizer; None: 0.7, and momentum 0.9 for "fixed", 0.7 otherwise.
        codec: "float32", "bfloat16" or "int8": how pseudo-gradients travel.
        replica_failure_policy: "strict": all or nothing; "skip": go on without those that are missing at the deadline.
        min_replicas: fewest replicas that may close a round under "skip"; None: more than half.
        timeout: seconds that a round waits for a missing replica.
        start_timeout: the same for the start, which ends with round 0, and for the first round after a resume. None:
            900, or `timeout` if that is longer.
        deadline: under "skip", "adaptive" gives a missing replica up sooner than after `timeout`, when the others have
            not kept one waiting for long in the last rounds; "fixed" never does.
        outer_device: where anchor and momentum live: "cpu", "model" or a device.
        weighting: "equal", or "tokens": by the tokens each replica saw.
        buffers: "average" or "local": what happens to floating-point buffers, such as BatchNorm's statistics.
        optimizer: index of the optimizer whose steps count; needed with more than one.
        pad_token_id, token_fn: how tokens are counted (`count_tokens`).
        validate_with: "local": the weights as they are; "shared": those that the fleet agreed on last.
        checkpoint_dir, checkpoint_every_rounds: this replica's own durable checkpoints (`latest_checkpoint`).
        checkpoint_every: rounds between two checkpoints of the shared state in the store, for newcomers.
        outliers: a pseudo-gradient whose norm sticks out of its round is told ("warn"), scaled down ("clip"), left out
            ("exclude") or taken as it is ("off"); outlier_threshold: its robust z-score, 3.5 unless given.
        aggregation: "mean"; "median" or "trimmed_mean" (with trim_fraction) for fleets that can't trust all replicas.
        signing_key_file: sign all objects with the key in this file, and refuse what isn't (docs/security.md).
        options: any other field of AutoLoCoConfig or OuterConfig, or option of the policy, by its name.

    Raises:
        ValueError: an option that can't work, named, at construction.

    After a fit, `rounds` holds the closed rounds' summaries and `final` how the run ended.
    """

    def __init__(
        self,
        store: Any = None,
        *,
        replica: int | None = None,
        replicas: int | None = None,
        launcher: str | None = None,
        collective: Collective | Callable[[int], Collective] | None = None,
        control: Any = None,
        run: str = "",
        policy: str | Policy = "autoloco",
        base_horizon: int | None = None,
        min_horizon: int | None = None,
        max_horizon: int | None = None,
        horizon_step: int | None = None,
        warmup_steps: int | None = None,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        normalize: bool = False,
        codec: str = "float32",
        replica_failure_policy: Literal["strict", "skip"] = "strict",
        min_replicas: int | None = None,
        timeout: float = 600.0,
        start_timeout: float | None = None,
        deadline: Literal["adaptive", "fixed"] = "adaptive",
        outer_device: str | torch.device = "cpu",
        weighting: Literal["equal", "tokens"] = "equal",
        buffers: Literal["average", "local"] = "average",
        optimizer: int | None = None,
        pad_token_id: int | None = None,
        token_fn: TokenFunction | None = None,
        validate_with: Literal["local", "shared"] = "local",
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every_rounds: int = 1,
        checkpoint_every: int | None = None,
        **options: Any,
    ) -> None:
        self._options = read_options(
            store,
            interrupted=self._told_to_stop,
            replica=replica,
            replicas=replicas,
            launcher=launcher,
            collective=collective,
            control=control,
            run=run,
            policy=policy,
            base_horizon=base_horizon,
            min_horizon=min_horizon,
            max_horizon=max_horizon,
            horizon_step=horizon_step,
            warmup_steps=warmup_steps,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            normalize=normalize,
            codec=codec,
            replica_failure_policy=replica_failure_policy,
            min_replicas=min_replicas,
            timeout=timeout,
            start_timeout=start_timeout,
            deadline=deadline,
            outer_device=outer_device,
            weighting=weighting,
            buffers=buffers,
            optimizer=optimizer,
            pad_token_id=pad_token_id,
            token_fn=token_fn,
            validate_with=validate_with,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every_rounds=checkpoint_every_rounds,
            checkpoint_every=checkpoint_every,
            **options,
        )
        self.policy, self.outer, self.identity = self._options.policy, self._options.outer, self._options.identity
        self._session: Session[Fit] = Session(self._options)
        self._trainer: pl.Trainer | None = None
        self._swap: AbstractContextManager[None] | None = None
        self._stop = False  # SIGTERM, to a process of a replica of several

    @property
    def rounds(self) -> list[RoundSummary]:
        """The closed rounds of the present or last fit."""
        return self._session.rounds

    @property
    def final(self) -> FinalSummary | None:
        """How the last fit ended; None while it runs."""
        return self._session.final

    @property
    def skipped(self) -> int:
        """Inner steps of the fleet that this replica never took, in the present or last fit."""
        return self._session.skipped

    @property
    def loop(self) -> OuterLoop | FollowingLoop | None:
        """The outer loop of the present or last fit, or what mirrors it on the further ranks of a replica."""
        return self._session.fit.loop if self._session.fit is not None else None

    @property
    def said(self) -> list[str]:
        """The warnings of the present or last fit."""
        return self._session.fit.said if self._session.fit is not None else []

    @property
    @override
    def state_key(self) -> str:
        return "AutoLoCo"

    def _told_to_stop(self) -> bool:
        own = self._stop or (self._trainer is not None and self._trainer.received_sigterm)
        return self._session.asked_to_stop(own)

    def _stop_here(self) -> None:
        self._stop = True

    # -- the fit -------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not isinstance(trainer, pl.Trainer):
            raise TypeError(
                f"this Trainer is a {type(trainer).__module__}.{type(trainer).__name__}; AutoLoCoCallback works with "
                "the lightning package: use `import lightning.pytorch as pl` throughout"
            )
        if stage != "fit":
            return
        check_strategy(trainer)
        self._trainer, self._session.stash = trainer, None
        separate_checkpoints(trainer, self.identity)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(trainer, pl_module)

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        def closed(summary: RoundSummary, metrics: Mapping[str, float]) -> None:
            log_round(trainer, pl_module, metrics)
            if self._session.saves_after(summary):
                self._save(trainer)

        ranks = None
        if trainer.world_size > 1:
            hear_sigterm(trainer, self._stop_here)
            ranks = Ranks(told_to_stop=lambda: self._stop or trainer.received_sigterm)
        with _preemption():
            self._session.begin(
                lambda met, then: Fit(trainer, pl_module, met, self._options, then, ranks), closed, ranks=ranks
            )

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if fit := self._session.running:
            fit.batch_begins(batch)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if fit := self._session.running:
            fit.steps.attempted(optimizer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if fit := self._session.running:
            with _preemption():
                self._session.final = fit.batch_ends(outputs)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end(trainer)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Lightning skips the training hooks when there is nothing to train: no batch at all, or a fit that was
        # complete but for the wait for the others. Both still belong to the fleet until its run ends.
        if (ended := self._session.stashed_end) is not None:
            self._session.final = ended
            return
        nothing = trainer.fit_loop.max_batches == 0 or trainer.limit_train_batches == 0
        if self._session.stash is not None or (nothing and self._session.running is None and self.final is None):
            self._begin(trainer, pl_module)
            self._end(trainer)

    def _end(self, trainer: pl.Trainer) -> None:
        if fit := self._session.running:
            with _preemption():
                self._session.final = fit.leave()
        if self._session.fit is not None:
            self._save(trainer)
            self._session.fit.stop()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._session.ranks is None or isinstance(exception, SIGTERMException):
            self._swap_back()  # of several ranks only together, and one may have failed alone
        if self._session.running is None:
            return
        if isinstance(exception, SIGTERMException):
            exception.code = _PREEMPTED
            try:
                self._save(trainer)
            finally:
                self._session.abandon("preempted")
        else:
            text = " ".join(f"{type(exception).__name__}: {exception}".split())
            self._session.abandon("failed", error=text[:300])

    # -- validation ----------------------------------------------------------------------------------------------

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        fit = self._session.running
        if self._options.validate_with == "shared" and fit is not None and trainer.state.fn == TrainerFn.FITTING:
            self._swap = fit.loop.shared_weights()
            self._swap.__enter__()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._swap_back()  # ModelCheckpoint saves after this: a resume needs this replica's own weights

    def _swap_back(self) -> None:
        swap, self._swap = self._swap, None
        if swap is not None:
            swap.__exit__(None, None, None)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._session.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._session.load_state_dict(state_dict)

    def _save(self, trainer: pl.Trainer) -> None:
        """This replica's own durable checkpoint; all its ranks together."""
        if self._options.checkpoint_dir is not None and self._session.fit is not None:
            save_replica(
                trainer,
                self._options.checkpoint_dir,
                self.identity.replica,
                self._session.ranks,
                round=self._session.fit.loop.round,
                step=trainer.global_step,
                fit=self._session.number,
            )


class _preemption:
    """A wait that SIGTERM cut short ends like any other step that SIGTERM cut short."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Interrupted):
            raise SIGTERMException(_PREEMPTED) from error
