"""A replica that joins a run that others began, and one that comes back when the run is over."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_replication.collective.object_store import begin_epoch
from composer_replication.lightning import AutoLoCoCallback, latest_checkpoint
from composer_replication.store import MemoryStore
from tests.lightning.helpers import Tiny, in_threads, loader, trainer

FIXED: dict[str, Any] = {"policy": "fixed", "base_horizon": 4}
SKIP: dict[str, Any] = {"replica_failure_policy": "skip", "timeout": 30.0, **FIXED}


def same_bits(one: Tiny, other: Tiny) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:no checkpoint of its own")
def test_a_replica_joins_and_ends_with_the_same_weights() -> None:
    store, under_way = MemoryStore(), threading.Event()

    class Paced(Tiny):
        """Of the two that begin: half-way they wait until the third has put something in."""

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            if batch_idx == 9:
                under_way.set()
            while batch_idx == 15 and not any("/ready/2.json" in key for key in store.list("rounds/")):
                time.sleep(0.005)
            return super().training_step(batch, batch_idx)

    def replica(index: int, _: Any) -> tuple[Tiny, AutoLoCoCallback]:
        module = Tiny(seed=index) if index == 2 else Paced(seed=index)
        if index == 2:
            assert under_way.wait(60)
        ours = AutoLoCoCallback(store, replica=index, replicas=2, checkpoint_every=1, **SKIP)
        trainer(ours, max_epochs=1).fit(module, loader(64))
        return module, ours

    (first, _), (second, _), (third, ours) = in_threads(3, replica)
    assert same_bits(first, second) and same_bits(first, third)
    assert ours.rounds and any(summary.included and 2 in summary.members for summary in ours.rounds)
    # Its share of the data is that of replica 2 mod 2, from the beginning.
    assert third.seen and sum(third.seen, []) == sum(first.seen, [])[: len(third.seen)]


def test_a_strict_fleet_admits_nobody() -> None:
    with pytest.raises(ValueError, match="further ones may join only under replica_failure_policy='skip'"):
        AutoLoCoCallback(MemoryStore(), replica=2, replicas=2, **FIXED)


def test_coming_back_when_the_run_is_over() -> None:
    """Without a checkpoint: nothing is trained, and the weights are the final ones."""
    store = MemoryStore()

    def replica(index: int, _: Any) -> tuple[Tiny, AutoLoCoCallback]:
        module = Tiny(seed=index, scheduler=True)
        ours = AutoLoCoCallback(store, replica=index, replicas=2, **FIXED)
        trainer(ours, max_epochs=1).fit(module, loader(24))
        return module, ours

    (first, one), (second, _) = in_threads(2, replica)
    for index in (1, 0):
        module, ours = Tiny(seed=5, scheduler=True), AutoLoCoCallback(store, replica=index, replicas=2, **FIXED)
        with pytest.warns(UserWarning, match="the run has finished, 3 rounds, 12 steps: nothing is trained here"):
            trainer(ours, max_epochs=1).fit(module, loader(24))
        assert module.seen == [] and same_bits(module, first) and same_bits(first, second)
        assert ours.final is not None and one.final is not None and ours.final.digest == one.final.digest
        assert ours.final.rounds == 3 and ours.rounds == []


@pytest.mark.filterwarnings("ignore:no checkpoint of its own")
@pytest.mark.filterwarnings("ignore:this resumes in the middle of an epoch")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended")
def test_a_run_goes_on_with_another_number_of_replicas(tmp_path: Path) -> None:
    """Both stop in the third round; one comes back with its checkpoint, one without, and a third is new."""
    store = MemoryStore()

    class Stops(Tiny):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            if batch_idx == 10:
                raise RuntimeError("the machines are gone")
            return super().training_step(batch, batch_idx)

    def make(index: int, replicas: int) -> AutoLoCoCallback:
        return AutoLoCoCallback(
            store,
            replica=index,
            replicas=replicas,
            checkpoint_dir=tmp_path,
            checkpoint_every=10,
            timeout=30.0,
            base_horizon=4,
            token_fn=lambda batch: 2,
        )

    def stopped(index: int, _: Any) -> None:
        with pytest.raises(RuntimeError, match="machines are gone"):
            trainer(make(index, 2), max_epochs=1).fit(Stops(seed=index), loader(48))

    in_threads(2, stopped)
    shutil.rmtree(tmp_path / "replica-1")
    assert begin_epoch(store, 3).first in (1, 2, 3)

    def resumed(index: int, _: Any) -> tuple[Tiny, AutoLoCoCallback]:
        module, ours = Tiny(seed=index), make(index, 3)
        trainer(ours, max_steps=24).fit(module, loader(96), ckpt_path=latest_checkpoint(tmp_path, index))
        return module, ours

    (first, one), (second, _), (third, _) = in_threads(3, resumed)
    assert same_bits(first, second) and same_bits(first, third)
    assert {len(summary.members) for summary in one.rounds} == {3}
    assert one.final is not None and one.final.position == 24
