"""AutoLoCo for a MosaicML Composer Trainer: one algorithm, and a sampler that gives each replica its share of the data.

    from composer_replication.composer import AutoLoCo

    Trainer(..., algorithms=[AutoLoCo("file:///shared/run1", base_horizon=500)])

started with `composer -n 4 -m composer_replication.run train.py`, which makes each process a replica.

Invariant: it translates and owns nothing: outer mathematics, boundaries and state live in
`composer_replication.diloco`.
In this package `composer` means MosaicML's.
"""

from __future__ import annotations

try:
    import composer as _composer  # noqa: F401
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] != "composer":
        raise
    raise ModuleNotFoundError(
        "composer_replication.composer needs Composer: pip install 'composer-replication[composer]'", name=error.name
    ) from error

from composer_replication.adapter.data import shard_iterable
from composer_replication.adapter.files import latest_checkpoint
from composer_replication.adapter.tokens import count_tokens
from composer_replication.composer.algorithm import AutoLoCo, AutoLoCoCallback
from composer_replication.composer.csv_logger import CSVLogger
from composer_replication.composer.data import replica_sampler

__all__ = [
    "AutoLoCo",
    "AutoLoCoCallback",
    "CSVLogger",
    "count_tokens",
    "latest_checkpoint",
    "replica_sampler",
    "shard_iterable",
]
