"""What can be said of a Lightning Trainer's loaders before training.

Invariant: a loader that every replica would read in full is never passed over in silence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from composer_replication.adapter.data import ShardedIterable, rank_share
from composer_replication.isolate import Identity

__all__ = ["forgets_its_place", "unsharded_reason", "unsharded_reasons"]


def unsharded_reason(loader: Any, identity: Identity, ranks: tuple[int, int] = (0, 1)) -> str | None:
    """Why `loader` may give the same samples to several replicas; None when each has its own share.

    `ranks`: this process's rank in its replica, and how many processes that has.
    """
    share = rank_share(identity, *ranks)
    if share.replicas == 1:
        return None
    if not isinstance(loader, DataLoader):
        return f"it is a {type(loader).__name__}, not a torch DataLoader"
    if isinstance(loader.dataset, ShardedIterable):
        if loader.dataset.share != share:
            return f"its dataset was sharded for {loader.dataset.share}, but this is {share}"
        return None
    if isinstance(loader.dataset, IterableDataset):
        return "its dataset is an IterableDataset: wrap it in composer_replication.lightning.shard_iterable"
    sampler = loader.sampler
    if not isinstance(sampler, DistributedSampler):
        return (
            f"its {type(sampler).__name__} isn't distributed: leave use_distributed_sampler on, or give it a "
            "DistributedSampler"
        )
    if (sampler.num_replicas, sampler.rank) != (share.replicas, share.shard):
        return f"its DistributedSampler is rank {sampler.rank} of {sampler.num_replicas}, but this is {share}"
    return None


def unsharded_reasons(loaders: Sequence[Any], identity: Identity, ranks: tuple[int, int] = (0, 1)) -> list[str]:
    return [reason for loader in loaders if (reason := unsharded_reason(loader, identity, ranks)) is not None]


def forgets_its_place(trainer: Trainer, loaders: Sequence[Any]) -> bool:
    """True if a resume inside an epoch starts its data over, and Lightning doesn't say so itself."""
    length, within = trainer.num_training_batches, trainer.fit_loop.epoch_loop.batch_progress.current.ready
    if not 0 < within < length or all(
        hasattr(one, "state_dict") and hasattr(one, "load_state_dict") for one in loaders
    ):
        return False
    # Lightning compares steps with an epoch's steps, where the length is known.
    return math.isinf(length) or trainer.global_step % math.ceil(length / trainer.accumulate_grad_batches) == 0
