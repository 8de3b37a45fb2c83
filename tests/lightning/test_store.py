"""The callback over the object-store rounds, in threads: lost intervals, interrupted waits, a second fit."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from composer_replication.collective.object_store import ObjectStoreCollective
from composer_replication.errors import FleetMismatch, RoundAborted, RoundTimeout
from composer_replication.lightning import AutoLoCoCallback, latest_checkpoint
from composer_replication.store import MemoryStore
from tests.lightning.helpers import Tiny, assert_same_bits, in_threads, loader, trainer, weights
from tests.lightning.test_resume import Rewindable

FIXED: dict[str, Any] = {"policy": "fixed", "base_horizon": 4}


def test_two_fits_over_one_store_are_two_runs() -> None:
    store = MemoryStore()

    def replica(index: int, _: Any) -> list[Any]:
        module = Tiny(seed=index)
        ours = AutoLoCoCallback(store, replica=index, replicas=2, **FIXED)
        fit = trainer(ours, max_epochs=1)
        fit.fit(module, loader(16))
        first = weights(module)
        fit.fit_loop.max_epochs = 2
        fit.fit(module, loader(16))
        return [first, weights(module)]

    first, second = in_threads(2, replica)
    assert_same_bits(first[0], second[0])
    assert_same_bits(first[1], second[1])
    tops = {key.split("/")[0] for key in store.list("")}
    assert "run-fit2" in tops and "fleet.json" in tops


class Wait(pl.Callback):
    """Holds a replica before a batch until `enough()`."""

    def __init__(self, batch: int, enough: Any) -> None:
        self.batch, self.enough = batch, enough

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            held = threading.Event()
            for _ in range(1000):
                if self.enough():
                    return
                held.wait(0.01)
            raise AssertionError("waited in vain")


def test_a_replica_that_is_overtaken_drops_its_interval_and_keeps_up_with_the_schedule() -> None:
    store = MemoryStore()

    def replica(index: int, _: Any) -> Any:
        collective = ObjectStoreCollective(
            store,
            replica=index,
            replicas=3,
            failure_policy="skip",
            timeout_seconds=0.3 if index < 2 else 60,
            heartbeat_seconds=0.05,
            poll_seconds=0.01,
        )
        module = Tiny(seed=index, scheduler=True)
        ours = AutoLoCoCallback(collective=collective, **FIXED)
        slow = [Wait(6, lambda: collective.overtaken)] if index == 2 else []
        # Wait is listed first: it holds the replica before its third step.
        fit = trainer(*slow, ours, max_steps=12, max_epochs=-1)
        fit.fit(module, loader(3 * 20))
        return module, ours, fit

    (first, ours, _), (second, *_), (third, theirs, fit) = in_threads(3, replica)
    assert_same_bits(weights(first), weights(second), weights(third))
    # Round 0 needs all of them under any policy; round 1 closes without the slow one.
    assert [summary.members for summary in ours.rounds[:2]] == [(0, 1, 2), (0, 1)] and 2 in ours.rounds[1].absent
    lost = theirs.rounds[1]
    assert not lost.included and theirs.final.intervals_lost == 1
    # It had not trained all of the 4 steps; its schedule was moved by what it missed (and slept through).
    missed = 12 - len(third.seen)
    assert missed >= 1 and lost.fast_forward == missed
    assert fit.lr_scheduler_configs[0].scheduler.last_epoch == 12
    assert theirs.rounds[-1].members == (0, 1, 2)
    assert theirs.final.digest == ours.final.digest


def test_sigterm_while_waiting_for_the_others(tmp_path: Path) -> None:
    """The interval is complete and is counted once: by the restart."""
    store = MemoryStore()
    waiting, restarted = threading.Event(), threading.Event()

    def straight(index: int, collective: Any) -> str:
        ours = AutoLoCoCallback(collective=collective, **FIXED)
        trainer(ours, max_epochs=1, strategy="auto").fit(Tiny(seed=index, optimizer="adamw"), Rewindable(24, index, 2))
        return ours.final.digest

    expected = in_threads(2, straight)[0]

    class Told(AutoLoCoCallback):
        """Receives SIGTERM when it has begun to wait."""

        def _told_to_stop(self) -> bool:
            waiting.set()
            self._trainer._signal_connector.received_sigterm = True  # type: ignore[union-attr]
            return super()._told_to_stop()

    def fit(index: int, kind: Any, **more: Any) -> Any:
        ours = kind(store, replica=index, replicas=2, checkpoint_dir=tmp_path, **FIXED)
        module = Tiny(seed=index, optimizer="adamw")
        path = latest_checkpoint(tmp_path, index)
        trainer(ours, *more.get("callbacks", []), max_epochs=1, strategy="auto").fit(
            module, Rewindable(24, index, 2), ckpt_path=path, weights_only=True
        )
        return ours, module

    def replica(index: int, _: Any) -> Any:
        if index == 1:
            return fit(1, AutoLoCoCallback, callbacks=[Wait(3, restarted.is_set)])
        with pytest.raises(SIGTERMException):
            fit(0, Told)
        assert waiting.is_set()
        saved = torch.load(str(latest_checkpoint(tmp_path, 0)), weights_only=True)
        state = saved["callbacks"]["AutoLoCo"]["fit_state"]["loop"]
        assert state["interval"]["steps"] == 4 and saved["global_step"] == 4
        restarted.set()
        return fit(0, AutoLoCoCallback)

    (ours, module), (theirs, _) = in_threads(2, replica)
    assert ours.final.digest == theirs.final.digest == expected
    assert [summary.round for summary in ours.rounds] == [0, 1, 2]
    assert [summary.members for summary in theirs.rounds] == [(0, 1)] * 3
    assert [batch[0] for batch in module.seen] == list(range(8, 24, 2))


def test_strict_ends_the_run_for_all_when_one_is_missing() -> None:
    store = MemoryStore()

    def replica(index: int, _: Any) -> Any:
        class Gone(Tiny):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                if index == 1 and batch_idx == 5:
                    raise RuntimeError("out of memory")
                return super().training_step(batch, batch_idx)

        ours = AutoLoCoCallback(store, replica=index, replicas=2, timeout=0.5, **FIXED)
        with pytest.raises((RoundAborted, RuntimeError)) as caught:
            trainer(ours, max_epochs=1).fit(Gone(), loader(24))
        return caught.value, len(ours.rounds)

    (aborted, rounds), (failed, _) = in_threads(2, replica)
    assert isinstance(aborted, RoundAborted) and "missing: replica 1" in str(aborted) and rounds == 1
    assert "out of memory" in str(failed)


def test_the_wait_for_a_replica_that_never_comes_ends_when_it_was_told_to() -> None:
    began = time.monotonic()
    ours = AutoLoCoCallback(MemoryStore(), replica=1, replicas=2, start_timeout=0.2, timeout=0.2, **FIXED)
    with pytest.raises(RoundTimeout, match="replica 0 has not published"):
        trainer(ours, max_epochs=1).fit(Tiny(), loader(16))
    assert time.monotonic() - began < 60  # not the 900 s that it is by default


def test_different_settings_are_refused_by_name() -> None:
    store = MemoryStore()

    def replica(index: int, _: Any) -> None:
        ours = AutoLoCoCallback(store, replica=index, replicas=2, timeout=5, policy="fixed", base_horizon=4 + index)
        trainer(ours, max_epochs=1).fit(Tiny(), loader(16))

    def alone(index: int, collective: Any) -> Any:
        if index == 1:
            with pytest.raises(FleetMismatch, match="horizon.*[45]"):
                replica(1, collective)
        else:
            ours = AutoLoCoCallback(store, replica=0, replicas=1, **FIXED, run="other")
            trainer(ours, max_epochs=1).fit(Tiny(), loader(4))

    # The first to come makes the fleet; the other is told what differs, before training.
    ready = ObjectStoreCollective(store, replica=0, replicas=2, start_timeout_seconds=5)
    first = AutoLoCoCallback(collective=ready, **FIXED)

    class Leave(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            raise KeyError("enough")

    with pytest.raises(KeyError):
        trainer(first, Leave(), max_epochs=1).fit(Tiny(), loader(16))
    in_threads(2, alone)


def test_a_store_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    ours = AutoLoCoCallback((tmp_path / "file").as_uri(), replica=0, replicas=1, **FIXED)
    module = Tiny()
    before = weights(module)
    with pytest.raises(Exception, match="file"):
        trainer(ours, max_epochs=1).fit(module, loader(4))
    assert_same_bits(before, weights(module))
