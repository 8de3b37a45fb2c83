"""AutoLoCo for a Lightning Trainer: one callback, and a strategy that gives each replica its share of the data.

    from composer_replication.lightning import AutoLoCoCallback

    Trainer(..., strategy="local_replica", callbacks=[
        AutoLoCoCallback("file:///shared/run1", replica=0, replicas=4, base_horizon=500),
    ])

Invariant: importing this package registers the strategies "local_replica" and "local_replica_fsdp". It translates and
owns nothing: outer mathematics, boundaries and state live in `composer_replication.diloco`.
"""

from __future__ import annotations

try:
    import lightning.pytorch as _lightning  # noqa: F401
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] != "lightning":
        raise
    raise ModuleNotFoundError(
        "composer_replication.lightning needs Lightning: pip install 'composer-replication[lightning]'", name=error.name
    ) from error

from composer_replication.adapter.data import shard_iterable
from composer_replication.adapter.files import latest_checkpoint
from composer_replication.adapter.tokens import count_tokens
from composer_replication.lightning.callback import AutoLoCoCallback
from composer_replication.lightning.strategy import LocalReplicaFSDPStrategy, LocalReplicaStrategy, register

__all__ = [
    "AutoLoCoCallback",
    "LocalReplicaFSDPStrategy",
    "LocalReplicaStrategy",
    "count_tokens",
    "latest_checkpoint",
    "shard_iterable",
]

register()
