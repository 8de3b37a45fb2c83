"""Each replica's share of the training data under Composer.

Invariant: which replica this is never comes from Composer's ranks: in its world there is only this replica.
"""

from __future__ import annotations

from typing import Any

from composer.utils import dist
from torch.utils.data import Dataset, DistributedSampler

from composer_replication.adapter.data import ShardedIterable, rank_share
from composer_replication.isolate import Identity, read_identity, read_rank

__all__ = ["replica_sampler", "unsharded_reason"]


def replica_sampler(
    dataset: Dataset[Any],
    *,
    drop_last: bool = False,
    shuffle: bool = False,
    seed: int = 0,
    replica: int | None = None,
    replicas: int | None = None,
) -> DistributedSampler[Any]:
    """A sampler of this replica's share of a map-style dataset, as `composer.utils.dist.get_sampler` is of a rank's.

    Composer itself begins each epoch's shuffling anew. `seed` must be equal on all replicas. Without numbers the
    replica's identity comes from the environment; raises ValueError if it isn't there.
    """
    who = rank_share(read_identity(replica=replica, replicas=replicas), *read_rank())
    return dist.get_sampler(
        dataset, drop_last=drop_last, shuffle=shuffle, num_replicas=who.replicas, rank=who.shard, seed=seed
    )


def unsharded_reason(loader: Any, identity: Identity) -> str | None:
    """Why `loader` gives the same samples to several replicas; None if it doesn't, or can't be told."""
    sampler, dataset = getattr(loader, "sampler", None), getattr(loader, "dataset", None)
    share = rank_share(identity, *read_rank())
    if share.replicas == 1:
        return None
    if isinstance(dataset, ShardedIterable) and dataset.share != share:
        return f"its dataset was sharded for {dataset.share}, but this is {share}"
    if isinstance(sampler, DistributedSampler):
        found = (sampler.num_replicas, sampler.rank)
        if found != (share.replicas, share.shard):
            return (
                f"its DistributedSampler is rank {sampler.rank} of {sampler.num_replicas}, but this is {share}: use "
                "composer_replication.composer.replica_sampler instead of composer.utils.dist.get_sampler"
            )
    return None
