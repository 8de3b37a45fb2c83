"""Fleets of replicas, each a job of its own: specs, executors, and the all-reduce through a store.

Names resolve when they are asked for, so that looking at an executor loads no trainer.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_replication.diloco.serverless.access_policy import RendezvousAccessPolicy
    from composer_replication.diloco.serverless.allreduce import ObjectStoreAllReduce
    from composer_replication.diloco.serverless.backends.azure_ml import AzureMLExecutor
    from composer_replication.diloco.serverless.backends.hf_jobs import HFJobsExecutor
    from composer_replication.diloco.serverless.backends.kuberay import KubeRayExecutor
    from composer_replication.diloco.serverless.backends.modal import ModalExecutor
    from composer_replication.diloco.serverless.backends.runpod import RunPodExecutor
    from composer_replication.diloco.serverless.backends.sagemaker import SageMakerExecutor
    from composer_replication.diloco.serverless.backends.vertex import VertexExecutor
    from composer_replication.diloco.serverless.backends.volcano import K8sExecutor, VolcanoExecutor
    from composer_replication.diloco.serverless.executor import (
        BaseExecutor,
        CollectTimeout,
        ReplicaHandle,
        ReplicaResult,
        ReplicaSpec,
        ServerlessExecutor,
    )
    from composer_replication.diloco.serverless.in_process import run_replica
    from composer_replication.diloco.serverless.local_process import LocalProcessExecutor
    from composer_replication.diloco.serverless.manager import MockManager, ObjectStoreManager
    from composer_replication.diloco.serverless.mixed import MixedExecutor

_HOME = {
    "AzureMLExecutor": "backends.azure_ml",
    "BaseExecutor": "executor",
    "CollectTimeout": "executor",
    "HFJobsExecutor": "backends.hf_jobs",
    "K8sExecutor": "backends.volcano",
    "KubeRayExecutor": "backends.kuberay",
    "LocalProcessExecutor": "local_process",
    "MixedExecutor": "mixed",
    "MockManager": "manager",
    "ModalExecutor": "backends.modal",
    "ObjectStoreAllReduce": "allreduce",
    "ObjectStoreManager": "manager",
    "RendezvousAccessPolicy": "access_policy",
    "ReplicaHandle": "handle",
    "ReplicaResult": "handle",
    "ReplicaSpec": "spec",
    "RunPodExecutor": "backends.runpod",
    "SageMakerExecutor": "backends.sagemaker",
    "ServerlessExecutor": "executor",
    "VertexExecutor": "backends.vertex",
    "VolcanoExecutor": "backends.volcano",
    "run_replica": "in_process",
}

__all__ = [
    "AzureMLExecutor",
    "BaseExecutor",
    "CollectTimeout",
    "HFJobsExecutor",
    "K8sExecutor",
    "KubeRayExecutor",
    "LocalProcessExecutor",
    "MixedExecutor",
    "MockManager",
    "ModalExecutor",
    "ObjectStoreAllReduce",
    "ObjectStoreManager",
    "RendezvousAccessPolicy",
    "ReplicaHandle",
    "ReplicaResult",
    "ReplicaSpec",
    "RunPodExecutor",
    "SageMakerExecutor",
    "ServerlessExecutor",
    "VertexExecutor",
    "VolcanoExecutor",
    "run_replica",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
