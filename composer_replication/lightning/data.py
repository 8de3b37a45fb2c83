"""Which part of the data each replica sees.

Invariant: a loader that every replica would read in full is never passed over in silence.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from composer_replication.isolate import Identity, read_identity

__all__ = [
    "ShardedIterable",
    "equal_first_batches",
    "fingerprint",
    "forgets_its_place",
    "shard_iterable",
    "shuffle_seed",
    "unsharded_reason",
    "unsharded_reasons",
]


class ShardedIterable(IterableDataset[Any]):
    """Every item of `dataset` for exactly one replica and one loader worker; see `shard_iterable`."""

    def __init__(self, dataset: Iterable[Any], identity: Identity) -> None:
        self.dataset = dataset
        self.identity = identity

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        workers, index = (worker.num_workers, worker.id) if worker is not None else (1, 0)
        # Item i belongs to replica i mod R, however many workers a replica has.
        first = index * self.identity.replicas + self.identity.replica
        return islice(iter(self.dataset), first, None, workers * self.identity.replicas)

    def __len__(self) -> int:
        total = len(self.dataset)  # type: ignore[arg-type]  # TypeError where it has no length, as for any dataset
        return len(range(self.identity.replica, total, self.identity.replicas))


def shard_iterable(dataset: Iterable[Any], replica: int | None = None, replicas: int | None = None) -> ShardedIterable:
    """This replica's share of an iterable dataset: item i goes to replica i mod replicas, split among loader workers.

    `dataset` must give all items, in the same order, to every process and worker: it must not split them itself.
    Without numbers the replica's identity comes from the environment. Raises ValueError if it isn't there.
    """
    return ShardedIterable(dataset, read_identity(replica=replica, replicas=replicas))


def unsharded_reason(loader: Any, identity: Identity) -> str | None:
    """Why `loader` may give the same samples to several replicas; None when each has its own share."""
    if identity.replicas == 1:
        return None
    if not isinstance(loader, DataLoader):
        return f"it is a {type(loader).__name__}, not a torch DataLoader"
    if isinstance(loader.dataset, ShardedIterable):
        if loader.dataset.identity != identity:
            return f"its dataset was sharded for {loader.dataset.identity}, but this is {identity}"
        return None
    if isinstance(loader.dataset, IterableDataset):
        return "its dataset is an IterableDataset: wrap it in composer_replication.lightning.shard_iterable"
    sampler = loader.sampler
    if not isinstance(sampler, DistributedSampler):
        return (
            f"its {type(sampler).__name__} isn't distributed: leave use_distributed_sampler on, or give it a "
            "DistributedSampler"
        )
    if (sampler.num_replicas, sampler.rank) != (identity.replicas, identity.replica):
        return f"its DistributedSampler is rank {sampler.rank} of {sampler.num_replicas}, but this is {identity}"
    return None


def unsharded_reasons(loaders: Sequence[Any], identity: Identity) -> list[str]:
    return [reason for loader in loaders if (reason := unsharded_reason(loader, identity)) is not None]


def shuffle_seed(loaders: Sequence[Any]) -> int | None:
    """The seed that the shards of shuffled loaders are cut with: shards overlap unless it is equal everywhere."""
    for loader in loaders:
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, DistributedSampler) and sampler.shuffle:
            return int(sampler.seed)
    return None


def forgets_its_place(trainer: Trainer, loaders: Sequence[Any]) -> bool:
    """True if a resume inside an epoch starts its data over, and Lightning doesn't say so itself."""
    length, within = trainer.num_training_batches, trainer.fit_loop.epoch_loop.batch_progress.current.ready
    if not 0 < within < length or all(
        hasattr(one, "state_dict") and hasattr(one, "load_state_dict") for one in loaders
    ):
        return False
    # Lightning compares steps with an epoch's steps, where the length is known.
    return math.isinf(length) or trainer.global_step % math.ceil(length / trainer.accumulate_grad_batches) == 0


def fingerprint(batch: Any) -> float:
    """A number that equal batches share, exact in a float (48 bits)."""
    hasher = hashlib.blake2b(digest_size=6)
    _update(hasher, batch)
    return float(int.from_bytes(hasher.digest(), "big"))


def equal_first_batches(replica: int, members: Mapping[int, Mapping[str, float]]) -> list[int]:
    """The other replicas whose first batch was the same as ours."""
    mine = members.get(replica, {}).get("first_batch")
    if mine is None:
        return []
    return sorted(r for r, metrics in members.items() if r != replica and metrics.get("first_batch") == mine)


def _update(hasher: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        hasher.update(f"{value.dtype}{tuple(value.shape)}".encode())
        hasher.update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            hasher.update(str(key).encode())
            _update(hasher, value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _update(hasher, item)
    else:
        hasher.update(repr(value).encode())
