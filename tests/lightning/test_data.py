"""Who trains on what: shards cover everything once, or somebody is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from composer_replication.adapter.data import check_seeds, fingerprint
from composer_replication.collective.in_process import InProcessFleet
from composer_replication.errors import FleetMismatch
from composer_replication.isolate import Identity
from composer_replication.lightning import shard_iterable
from composer_replication.lightning.data import unsharded_reason
from tests.lightning.helpers import Numbered, Tiny, callback, flat, in_threads, loader, trainer


class Stream(IterableDataset[dict[str, Tensor]]):
    def __init__(self, count: int) -> None:
        self.samples = Numbered(count)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.samples[i] for i in range(len(self.samples)))


def train_on(batches: Any, **settings: Any) -> list[list[int]]:
    """The ids that each of two replicas trained on."""

    def replica(index: int, collective: Any) -> list[int]:
        module = Tiny()
        data = batches(index) if callable(batches) else batches
        trainer(callback(collective, base_horizon=10), **{"max_epochs": 1, **settings}).fit(module, data)
        return flat(module.seen)

    return in_threads(2, replica)


@pytest.mark.parametrize("shuffle", [False, True])
def test_map_style_data_is_cut_in_two(shuffle: bool) -> None:
    first, second = train_on(lambda _: loader(100, batch_size=5, shuffle=shuffle))
    assert sorted(first + second) == list(range(100))
    assert len(first) == len(second) == 50


def test_shares_of_an_iterable_and_their_lengths() -> None:
    shares = [shard_iterable(range(101), replica, 2) for replica in (0, 1)]
    assert [list(share) for share in shares] == [list(range(0, 101, 2)), list(range(1, 101, 2))]
    assert [len(share) for share in shares] == [51, 50]
    with pytest.raises(TypeError):
        len(shard_iterable(Stream(3), 0, 2))


@pytest.mark.processes
def test_iterable_data_with_real_workers() -> None:
    first, second = train_on(lambda i: DataLoader(shard_iterable(Stream(100), i, 2), batch_size=2, num_workers=2))
    assert sorted(first + second) == list(range(100))
    assert {i % 2 for i in first} == {0}


def test_every_replica_validates_on_everything() -> None:
    class Validated(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.validated: list[list[int]] = []

        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.validated.append(batch["id"].tolist())

    def replica(_: int, collective: Any) -> list[int]:
        module = Validated()
        fit = trainer(callback(collective), max_epochs=1, num_sanity_val_steps=0)
        fit.fit(module, loader(16), loader(9, batch_size=2))
        during = flat(module.validated)
        module.validated.clear()
        fit.validate(module, loader(9, batch_size=2), verbose=False)
        assert flat(module.validated) == list(range(9))
        return during

    assert in_threads(2, replica) == [list(range(9))] * 2


def test_loaders_that_cannot_be_sharded_are_named() -> None:
    me = Identity(replica=1, replicas=2)
    samples = Numbered(8)
    assert "IterableDataset" in str(unsharded_reason(DataLoader(Stream(8)), me))
    assert "isn't distributed" in str(unsharded_reason(DataLoader(samples, sampler=RandomSampler(samples)), me))
    assert "rank 0 of 2" in str(unsharded_reason(DataLoader(samples, sampler=DistributedSampler(samples, 2, 0)), me))
    assert "sharded for" in str(unsharded_reason(DataLoader(shard_iterable(Stream(8), 0, 2)), me))
    assert "not a torch DataLoader" in str(unsharded_reason([1, 2], me))
    assert unsharded_reason(DataLoader(samples, sampler=DistributedSampler(samples, 2, 1)), me) is None
    assert unsharded_reason(DataLoader(shard_iterable(Stream(8), 1, 2)), me) is None
    assert unsharded_reason(DataLoader(Stream(8)), Identity(replica=0, replicas=1)) is None


def test_an_iterable_that_isn_t_sharded_is_told_before_training() -> None:
    first: list[int] = []

    class Stop(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            first.append(1)

    collective = InProcessFleet(2, timeout_seconds=0.01).collectives()[0]  # nobody else comes
    with pytest.warns(UserWarning, match="IterableDataset: wrap it in composer_replication.lightning.shard_iterable"):
        with pytest.raises(Exception, match="replica 1"):
            trainer(callback(collective), Stop(), max_epochs=1).fit(Tiny(), DataLoader(Stream(8)))
    assert first == []


@pytest.mark.filterwarnings("ignore:.*began with the same batch:UserWarning")
def test_equal_first_batches_are_reported() -> None:
    def replica(index: int, collective: Any, equal: bool) -> list[str]:
        batches = loader(16) if equal else DataLoader(Numbered(16), sampler=DistributedSampler(Numbered(16), 2, index))
        ours = callback(collective)
        # "auto" shards nothing; that is all right as long as the data differ.
        trainer(ours, max_epochs=1, strategy="auto").fit(Tiny(), batches)
        return ours.said

    for mine, other in ((0, 1), (1, 0)):
        said = in_threads(2, lambda i, c: replica(i, c, True))[mine]
        assert len(said) == 1
        assert f"replicas [{other}] began with the same batch" in said[0]
        assert "strategy='local_replica' shards it" in said[0]
    assert in_threads(2, lambda i, c: replica(i, c, False)) == [[], []]


def test_fingerprints() -> None:
    batch = {"x": torch.arange(4), "more": [torch.ones(2, dtype=torch.bfloat16), "text"]}
    same = {"x": torch.arange(4), "more": [torch.ones(2, dtype=torch.bfloat16), "text"]}
    assert fingerprint(batch) == fingerprint(same)
    others = [{**batch, "x": torch.arange(4).reshape(2, 2)}, {**batch, "x": torch.arange(4).int()}, {"x": batch["x"]}]
    assert len({fingerprint(one) for one in [batch, *others]}) == 4
    assert fingerprint(batch).is_integer() and fingerprint(batch) < 2**48


def test_shards_cut_with_different_seeds_are_refused() -> None:
    def replica(index: int, collective: Any) -> None:
        sampler = DistributedSampler(Numbered(16), 2, index, seed=index)
        trainer(callback(collective), max_epochs=1).fit(Tiny(), DataLoader(Numbered(16), sampler=sampler))

    with pytest.raises(FleetMismatch, match="data_seed: replica . cuts its shards of the data with"):
        in_threads(2, replica)


def test_seeds_are_compared_between_those_that_have_one() -> None:
    check_seeds(0, {0: {"data_seed": 1.0}, 1: {}, 2: {"data_seed": 1.0}})
    check_seeds(0, {0: {}, 1: {"data_seed": 2.0}})
    with pytest.raises(FleetMismatch, match="replica 0 .* with 1, replica 2 with 7,.* same seed"):
        check_seeds(0, {0: {"data_seed": 1.0}, 1: {"data_seed": 1.0}, 2: {"data_seed": 7.0}})


def test_no_warning_when_all_is_well() -> None:
    def replica(_: int, collective: Any) -> list[str]:
        ours = callback(collective)
        trainer(ours, max_epochs=1).fit(Tiny(), loader(40))  # a warning of anybody's would be an error
        return ours.said

    assert in_threads(2, replica) == [[], []]


def test_epochs_reload_and_restart_between_rounds() -> None:
    """Rounds don't care where epochs end: 3 epochs of 6 steps, rounds of 4."""

    def replica(index: int, collective: Any) -> Any:
        ours = callback(collective)
        data = DataLoader(Numbered(12), batch_size=1, shuffle=True)
        trainer(ours, max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(Tiny(), data)
        return [summary.steps for summary in ours.rounds]

    assert in_threads(2, replica) == [[4, 4, 4, 4, 2]] * 2
