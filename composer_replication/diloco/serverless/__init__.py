"""Fleets of replicas, each a job of its own: specs, executors, and the all-reduce through a store.

Names resolve when they are asked for, so that looking at an executor loads no trainer.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_replication.diloco.serverless.allreduce import ObjectStoreAllReduce
    from composer_replication.diloco.serverless.executor import (
        BaseExecutor,
        CollectTimeout,
        ReplicaHandle,
        ReplicaResult,
        ReplicaSpec,
        ServerlessExecutor,
    )
    from composer_replication.diloco.serverless.local_process import LocalProcessExecutor
    from composer_replication.diloco.serverless.manager import MockManager, ObjectStoreManager
    from composer_replication.diloco.serverless.mixed import MixedExecutor

_HOME = {
    "BaseExecutor": "executor",
    "CollectTimeout": "executor",
    "LocalProcessExecutor": "local_process",
    "MixedExecutor": "mixed",
    "MockManager": "manager",
    "ObjectStoreAllReduce": "allreduce",
    "ObjectStoreManager": "manager",
    "ReplicaHandle": "handle",
    "ReplicaResult": "handle",
    "ReplicaSpec": "spec",
    "ServerlessExecutor": "executor",
}

__all__ = [
    "BaseExecutor",
    "CollectTimeout",
    "LocalProcessExecutor",
    "MixedExecutor",
    "MockManager",
    "ObjectStoreAllReduce",
    "ObjectStoreManager",
    "ReplicaHandle",
    "ReplicaResult",
    "ReplicaSpec",
    "ServerlessExecutor",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
