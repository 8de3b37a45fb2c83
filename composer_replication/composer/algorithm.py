"""`AutoLoCo`: runs the outer loop inside a Composer Trainer.

Invariant: it is the first algorithm at the end of a batch, so that every other algorithm, callback, evaluation and
checkpoint sees the weights that the fleet agreed on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from composer.core import Algorithm, Callback, Event, State
from composer.loggers import Logger
from composer.utils import dist, reproducibility
from typing_extensions import override

from composer_replication.adapter.driver import Closed
from composer_replication.adapter.files import write_checkpoint
from composer_replication.adapter.options import read_options
from composer_replication.adapter.session import Session
from composer_replication.collective.base import Collective
from composer_replication.composer.fit import Fit
from composer_replication.composer.world import check_savers, check_state, check_world
from composer_replication.diloco.loop import OuterLoop
from composer_replication.diloco.ranks.channel import Ranks
from composer_replication.diloco.ranks.loop import FollowingLoop
from composer_replication.diloco.summary import FinalSummary, RoundSummary

__all__ = ["AutoLoCo", "AutoLoCoCallback"]


class AutoLoCo(Algorithm):
    """Trains alone, and takes one outer step with the other replicas at the end of each interval.

    Args:
        store: URI of the place where the replicas meet ("s3://bucket/run1", "file:///shared/run1"). Left out:
            COMPOSER_REPLICATION_STORE.
        step_schedulers_every_batch: as you gave it to the Trainer, so that the rates of the first interval are foreseen
            exactly. Left out: the Trainer's default (every batch for Composer's schedulers, every epoch for torch's).
        options: those of `composer_replication.lightning.AutoLoCoCallback`, by the same names: replica, replicas, run,
            policy, base_horizon, min_horizon, max_horizon, warmup_steps, outer_lr, outer_momentum, codec,
            replica_failure_policy, timeout, outliers, aggregation, signing_key_file, weighting, buffers,
            validate_with, checkpoint_dir, ... and every field of
            AutoLoCoConfig and OuterConfig. All but token_fn and collective can stand in a YAML file.

    Raises:
        ValueError: an option that can't work, or a process that isn't a replica of its own, at construction.

    After a fit, `rounds` holds the closed rounds' summaries and `final` how the run ended.
    """

    def __init__(self, store: Any = None, *, step_schedulers_every_batch: bool | None = None, **options: Any) -> None:
        check_world()
        if options.get("optimizer") not in (None, 0):
            raise ValueError(f"optimizer must be 0: Composer trains with one, got {options['optimizer']!r}")
        # SIGTERM ends a wait by itself: Composer's handler raises SystemExit there.
        self._options = read_options(store, interrupted=self._lost_a_rank, **options)
        self.policy, self.outer, self.identity = self._options.policy, self._options.outer, self._options.identity
        self._every_batch = step_schedulers_every_batch
        self._session: Session[Fit] = Session(self._options)
        self._swap: AbstractContextManager[None] | None = None
        self._save_due = False

    def _lost_a_rank(self) -> bool:
        """In a wait: whether to end it. False, or RankLost if another rank of this replica was told to stop."""
        return self._session.asked_to_stop(False)

    @property
    def rounds(self) -> list[RoundSummary]:
        """The closed rounds of the present or last fit."""
        return self._session.rounds

    @property
    def final(self) -> FinalSummary | None:
        """How the last fit ended, or that of the loaded checkpoint; None while one runs."""
        return self._session.final or self._session.stashed_end

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

    @override
    def match(self, event: Event, state: State) -> bool:
        return event in _HANDLERS

    @override
    def apply(self, event: Event, state: State, logger: Logger) -> int | None:
        try:
            _HANDLERS[event](self, state, logger)
        except BaseException as error:
            self.close(error)
            raise
        return None

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Composer calls this of callbacks only."""
        raise TypeError(
            "AutoLoCo is an algorithm: give it to the Trainer with algorithms=[AutoLoCo(...)], or use "
            "callbacks=[AutoLoCoCallback(...)]"
        )

    # -- events --------------------------------------------------------------------------------------------------

    def _init(self, state: State, logger: Logger) -> None:
        check_state(state)
        if sum(isinstance(one, AutoLoCo) for one in state.algorithms) > 1:
            raise ValueError("there are two AutoLoCo in this Trainer: leave one out")
        state.algorithms.remove(self)
        state.algorithms.insert(0, self)
        state.callbacks.append(_Closer(self))
        check_savers(state, self.identity)

    def _fit_start(self, state: State, logger: Logger) -> None:
        check_state(state)
        self._save_due = False

        def closed(summary: RoundSummary, metrics: Mapping[str, float]) -> None:
            logger.log_metrics(dict(metrics))
            self._save_due = self._save_due or self._session.saves_after(summary)

        ranks = Ranks() if dist.get_world_size() > 1 else None

        def make(met: Collective, then: Closed) -> Fit:
            return Fit(state, met, self._options, then, every_batch=self._every_batch, ranks=ranks)

        self._session.begin(make, closed, ranks=ranks)

    def _batch_start(self, state: State, logger: Logger) -> None:
        if fit := self._session.running:
            fit.batch_begins()

    def _after_train_batch(self, state: State, logger: Logger) -> None:
        if fit := self._session.running:
            fit.gradients_ready()

    def _batch_end(self, state: State, logger: Logger) -> None:
        if fit := self._session.running:
            self._session.final = fit.batch_ends()

    def _batch_checkpoint(self, state: State, logger: Logger) -> None:
        if self._save_due:  # not at BATCH_END, where other algorithms are still to act on the new weights
            self._save(state)

    def _epoch_end(self, state: State, logger: Logger) -> None:
        assert state.max_duration is not None
        if state.timestamp >= state.max_duration:
            self._leave()

    def _fit_end(self, state: State, logger: Logger) -> None:
        self._leave()
        self._save(state)
        if self._session.fit is not None:
            self._session.fit.stop()

    def _leave(self) -> None:
        if fit := self._session.running:
            self._session.final = fit.leave()

    def _eval_before_all(self, state: State, logger: Logger) -> None:
        if self._options.validate_with == "shared" and (fit := self._session.running):
            self._swap = fit.loop.shared_weights()
            self._swap.__enter__()

    def _eval_after_all(self, state: State, logger: Logger) -> None:
        swap, self._swap = self._swap, None
        if swap is not None:
            swap.__exit__(None, None, None)

    # -- checkpoints and the end ---------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._session.state_dict()

    @override
    def load_state_dict(self, state: dict[str, Any], strict: bool = False) -> None:
        if state:  # else it was written before the fit began
            self._session.load_state_dict(state)

    def _save(self, state: State) -> None:
        """This replica's own durable checkpoint, in the form of Composer's."""
        self._save_due = False
        if self._options.checkpoint_dir is not None and self._session.fit is not None:
            content = {"state": state.state_dict(), "rng": reproducibility.get_rng_state()}
            write = partial(
                write_checkpoint,
                self._options.checkpoint_dir,
                self.identity.replica,
                content,
                round=self._session.fit.loop.round,
                step=state.timestamp.batch.value,
                fit=self._session.number,
            )
            if self._session.ranks is None:
                write()
            else:  # all of them have given their parts; the whole is rank 0's
                self._session.ranks.on_first(write)

    def close(self, error: BaseException | None = None) -> None:
        """Tell the fleet how this replica ended, and stop its heartbeat. Harmless when called again."""
        if error is None or isinstance(error, (SystemExit, KeyboardInterrupt)):
            self._session.abandon("preempted")
        else:
            self._session.abandon("failed", error=" ".join(f"{type(error).__name__}: {error}".split())[:300])


_HANDLERS = {
    Event.INIT: AutoLoCo._init,
    Event.FIT_START: AutoLoCo._fit_start,
    Event.BATCH_START: AutoLoCo._batch_start,
    Event.AFTER_TRAIN_BATCH: AutoLoCo._after_train_batch,
    Event.BATCH_END: AutoLoCo._batch_end,
    Event.BATCH_CHECKPOINT: AutoLoCo._batch_checkpoint,
    Event.EPOCH_END: AutoLoCo._epoch_end,
    Event.FIT_END: AutoLoCo._fit_end,
    Event.EVAL_BEFORE_ALL: AutoLoCo._eval_before_all,
    Event.EVAL_AFTER_ALL: AutoLoCo._eval_after_all,
}


class _Closer(Callback):
    """Algorithms aren't told when a Trainer closes; callbacks are, sometimes twice."""

    def __init__(self, algorithm: AutoLoCo) -> None:
        self._algorithm = algorithm

    @override
    def close(self, state: State, logger: Logger) -> None:
        # At the interpreter's exit this is the exception that ended the program, if one did.
        self._algorithm.close(getattr(sys, "last_value", None))


class AutoLoCoCallback(Callback):
    """`AutoLoCo` for `callbacks=`: takes the same arguments, and puts the algorithm into the Trainer as `algorithm`."""

    def __init__(self, store: Any = None, **options: Any) -> None:
        self.algorithm = AutoLoCo(store, **options)

    @override
    def init(self, state: State, logger: Logger) -> None:
        # Callbacks come before algorithms at this one event: the algorithm is initialised right after.
        state.algorithms.insert(0, self.algorithm)
