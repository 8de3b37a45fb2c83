"""Where replicas can run: the one table of back ends, as import paths.

Invariant: names and strings only. Whoever wants an executor imports its module then, and that loads no vendor's client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["BACKENDS", "Backend"]


class Backend(NamedTuple):
    module: str
    name: str  # of the class


_PLACE = "composer_replication.diloco.serverless"

BACKENDS: Mapping[str, Backend] = {
    "local": Backend(f"{_PLACE}.local_process", "LocalProcessExecutor"),
    "modal": Backend(f"{_PLACE}.backends.modal", "ModalExecutor"),
    "hf_jobs": Backend(f"{_PLACE}.backends.hf_jobs", "HFJobsExecutor"),
    "sagemaker": Backend(f"{_PLACE}.backends.sagemaker", "SageMakerExecutor"),
    "vertex": Backend(f"{_PLACE}.backends.vertex", "VertexExecutor"),
    "azure_ml": Backend(f"{_PLACE}.backends.azure_ml", "AzureMLExecutor"),
    "volcano": Backend(f"{_PLACE}.backends.volcano", "VolcanoExecutor"),
    "kuberay": Backend(f"{_PLACE}.backends.kuberay", "KubeRayExecutor"),
    "runpod": Backend(f"{_PLACE}.backends.runpod", "RunPodExecutor"),
}
