"""Which part of the data each replica sees, and how replicas notice that they see the same.

Invariant: equal first batches are found by their content, whatever loader they came from.

The data is cut into as many shards as the run began with replicas, and that stays so: a replica that joins later (its
id is `replicas` or more) reads shard id mod replicas from its beginning, which another one has read before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from composer_replication.errors import FleetMismatch
from composer_replication.isolate import Identity, read_identity, read_rank

__all__ = [
    "ShardedIterable",
    "check_seeds",
    "equal_first_batches",
    "fingerprint",
    "rank_share",
    "shard_iterable",
    "shuffle_seed",
]


def rank_share(identity: Identity, rank: int, ranks: int) -> Identity:
    """The share of the data of one of a replica's processes, as if each of them were a replica."""
    return Identity(replica=identity.shard * ranks + rank, replicas=identity.replicas * ranks)


class ShardedIterable(IterableDataset[Any]):
    """Every item of `dataset` for exactly one replica, process of it, and loader worker; see `shard_iterable`."""

    def __init__(self, dataset: Iterable[Any], identity: Identity) -> None:
        self.dataset = dataset
        self.identity = identity

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        workers, index = (worker.num_workers, worker.id) if worker is not None else (1, 0)
        # Item i belongs to replica i mod R, however many workers a replica has; with K processes each, to one i mod RK.
        share = self.share
        return islice(iter(self.dataset), index * share.replicas + share.shard, None, workers * share.replicas)

    def __len__(self) -> int:
        total = len(self.dataset)  # type: ignore[arg-type]  # TypeError where it has no length, as for any dataset
        return len(range(self.share.shard, total, self.share.replicas))

    @property
    def share(self) -> Identity:
        """This process's; asked for late, as it may be told only when the trainer sets its processes up."""
        return rank_share(self.identity, *read_rank())


def shard_iterable(dataset: Iterable[Any], replica: int | None = None, replicas: int | None = None) -> ShardedIterable:
    """This replica's share of an iterable dataset: item i goes to replica i mod replicas, split among its processes
    and loader workers.

    `dataset` must give all items, in the same order, to every process and worker: it must not split them itself.
    Without numbers the replica's identity comes from the environment. Raises ValueError if it isn't there.
    """
    return ShardedIterable(dataset, read_identity(replica=replica, replicas=replicas))


def shuffle_seed(loaders: Sequence[Any]) -> int | None:
    """The seed that the shards of shuffled loaders are cut with: shards overlap unless it is equal everywhere."""
    for loader in loaders:
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, DistributedSampler) and sampler.shuffle:
            return int(sampler.seed)
    return None


def check_seeds(replica: int, members: Mapping[int, Mapping[str, float]]) -> None:
    """Raise FleetMismatch if another member of the round cuts its shards with another seed than ours.

    Not a setting of the fleet that is compared at the start: replicas that don't shuffle have none, and may join.
    """
    mine = members.get(replica, {}).get("data_seed")
    if mine is None:
        return
    for other, metrics in sorted(members.items()):
        theirs = metrics.get("data_seed", mine)
        if theirs != mine:
            raise FleetMismatch(
                f"data_seed: replica {replica} cuts its shards of the data with {mine:.0f}, replica {other} with "
                f"{theirs:.0f}, so that they overlap: give all replicas the same seed"
            )


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
